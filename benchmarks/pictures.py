"""Draws the pictures of README.md and docs from committed files, light and dark, in a minute.

    .venv/bin/python -m benchmarks.pictures [NAME ...] [--list]

Each file in docs/images says by a digest what it was drawn from, and a test compares that with what is committed. What
measures draws its pictures anew as well.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ncz_plugins.cli.picture import DARK, LIGHT, rendered

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SCHEMES = {"": LIGHT, "-dark": DARK}  # by how the name of the file ends
COLORS = 256  # of a palette, which makes a file some times smaller
SOURCE = "Source"  # what the digest is called in the file
FOLDERS = "benchmarks/convergence", "examples"  # of modules that are no part of a package


class Picture(NamedTuple):
    """How a picture comes about.

    Attributes:
        draw: "module:function"; the function takes the documents, and returns a figure.
        files: names of what it shows in benchmarks/results; none: it shows what its module says.
        has_palette: whether it has few colours.
    """

    draw: str
    files: tuple[str, ...] = ()
    has_palette: bool = True

    @property
    def sources(self) -> list[Path]:
        """What the picture depends on."""
        module = self.draw.partition(":")[0].replace(".", "/")
        found = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in self.files]
        return found or [ROOT / f"{module}.py"]

    def digest(self) -> str:
        """That of all sources, whatever the ends of their lines."""
        content = b"\n".join(path.read_bytes().replace(b"\r\n", b"\n") for path in self.sources)
        return hashlib.sha256(content).hexdigest()

    @property
    def function(self) -> Callable[..., Figure]:
        """What draws it."""
        sys.path += [folder for each in FOLDERS if (folder := str(ROOT / each)) not in sys.path]
        return resolve_name(self.draw)

    def figure(self) -> Figure:
        """What is in the files, drawn."""
        return self.function(*(json.loads(path.read_text()) for path in self.sources if self.files))


STEPS = "end-to-end", "end-to-end-ddp", "end-to-end-fsdp"
PICTURES = {
    "activations": Picture("activations:draw", ("activations",)),
    "codec": Picture("ncz_plugins.cli.codec.plot:figure", ("codec-bounds",)),
    "convergence": Picture("outcome:draw", ("convergence",)),
    "convergence-curves": Picture("outcome:draw_curves", ("convergence",)),
    "demo": Picture("demo:draw", ("demo",)),
    "end-to-end": Picture("benchmarks.end_to_end:draw", ("end-to-end",)),
    "end-to-end-weights": Picture("benchmarks.end_to_end:draw", ("end-to-end-weights",)),
    "evidence": Picture("evidence:draw", ("frontier", "convergence")),
    "frontier": Picture("frontier:draw", ("frontier", "convergence")),
    "gains": Picture("benchmarks.gains:draw", ("perf-default-2-ranks", *STEPS)),
    "gpu": Picture("benchmarks.gpu:draw", ("gpu",)),
    "halo": Picture("halo_exchange:draw", ("halo",), has_palette=False),
    "perf": Picture("benchmarks.laboratory.plot:committed", ("perf-links",)),
    "plan": Picture("benchmarks.plan:draw", ("plan",)),
    "plan-ranks": Picture("benchmarks.plan:draw_ranks", ("plan-ranks",)),
    "quantize-once": Picture("benchmarks.schemes.quantize_once:draw"),
    "way-of-a-call": Picture("benchmarks.schemes.way_of_a_call:draw"),
}


def redraw(*names: str) -> None:
    """Draw some pictures anew, in both schemes."""
    for name in names:
        picture = PICTURES[name]
        for end, scheme in SCHEMES.items():
            image = Image.open(io.BytesIO(rendered(picture.figure, scheme))).convert("RGB")
            if picture.has_palette:
                image = image.quantize(COLORS, dither=Image.Dither.NONE)
            told = PngInfo()
            told.add_text(SOURCE, picture.digest())
            image.save(IMAGES / f"{name}{end}.png", optimize=True, pnginfo=told)


def digest_in(path: Path) -> str | None:
    """The digest in a file that `redraw` has written."""
    with Image.open(path) as image:
        return image.info.get(SOURCE)


def drawable() -> list[str]:
    """The pictures whose files are there."""
    return [name for name, each in PICTURES.items() if all(path.exists() for path in each.sources)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pictures; default: all whose files are there")
    parser.add_argument("--list", action="store_true", help="say what each picture is drawn from, and by what")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in PICTURES]:
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in arguments.names or drawable():
        if arguments.list:
            print(f"{name}: {PICTURES[name].draw} of {', '.join(path.name for path in PICTURES[name].sources)}")
        else:
            redraw(name)


if __name__ == "__main__":
    main()
