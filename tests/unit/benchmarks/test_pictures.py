"""The pictures of README.md and docs are those of the committed files, in both schemes."""

import io
import re

import pytest
from repository import ROOT

pytest.importorskip("matplotlib")

from PIL import Image

from benchmarks import pictures
from ncz_plugins.cli import picture

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("end", pictures.SCHEMES)
@pytest.mark.parametrize("name", pictures.drawable())
def test_a_picture_was_drawn_from_the_committed_files(name, end):
    made_of = pictures.digest_in(pictures.IMAGES / f"{name}{end}.png")
    sources = ", ".join(path.name for path in pictures.PICTURES[name].sources)
    assert made_of == pictures.PICTURES[name].digest(), f"{sources}: python -m benchmarks.pictures {name}"


def test_every_picture_is_known():
    drawn = {f"{name}{end}.png" for name in pictures.drawable() for end in pictures.SCHEMES}
    known = drawn | {f"{name}.png" for name in pictures.PICTURES}
    there = {path.name for path in pictures.IMAGES.iterdir()}
    assert drawn <= there <= known


def test_pictures_can_be_read_on_a_phone():
    for path in pictures.IMAGES.iterdir():
        with Image.open(path) as image:
            width, height = image.size
        assert width == 960 and height <= 1.6 * width, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_picture_for_each_scheme(page):
    named = re.findall(r"images/([\w-]+)\.png", page.read_text())
    light = [name for name in named if not name.endswith("-dark") and name in pictures.drawable()]
    assert sorted(f"{name}-dark" for name in light) == sorted(name for name in named if name.endswith("-dark"))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_what_draws_a_picture_is_there(name):
    assert callable(pictures.PICTURES[name].function)


@pytest.mark.parametrize("end", pictures.SCHEMES)
def test_a_picture_has_the_colours_of_its_scheme(end):
    """Text on the background, at the contrast that the guidelines for the web ask for."""
    scheme = pictures.SCHEMES[end]
    drawn = Image.open(io.BytesIO(picture.rendered(pictures.PICTURES["way-of-a-call"].figure, scheme))).convert("RGB")
    assert "#{:02x}{:02x}{:02x}".format(*drawn.getpixel((0, 0))) == scheme["figure.facecolor"]
    assert contrast(scheme["text.color"], scheme["figure.facecolor"]) >= 7


@pytest.mark.parametrize("color", sorted({*picture.COLORS.values(), *picture.OTHERS}))
def test_a_colour_stands_out_in_both_schemes(color):
    assert all(contrast(color, scheme["figure.facecolor"]) >= 3 for scheme in pictures.SCHEMES.values())


def contrast(*colors):
    """By the Web Content Accessibility Guidelines."""
    low, high = sorted(map(luminance, colors))
    return (high + 0.05) / (low + 0.05)


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
