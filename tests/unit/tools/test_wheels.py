"""What `make wheels` publishes: a small, stripped library, a source distribution that lacks nothing, a page."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from html.parser import HTMLParser

import markdown
import pytest
from repository import ROOT

from ncz_plugins.version import __version__

# All that the package is built from.
SOURCES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# As pip builds a wheel from a source distribution.
BUILD_WHEEL = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
DESCRIBE = "import setuptools.build_meta as backend; print(backend.prepare_metadata_for_build_wheel('.'))"


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import wheels

    return wheels


@pytest.fixture
def wheel_with(wheels, tmp_path):
    """A wheel that holds a library, or none."""

    def make(library: bytes | None):
        wheel = tmp_path / "ncz_plugins.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("ncz_plugins/version.py", "")
            if library is not None:
                archive.writestr(wheels.LIBRARY, library)
        return wheel

    return make


def test_the_library_can_be_published(wheels, wheel_with):
    wheels.check_library(wheel_with((ROOT / wheels.LIBRARY).read_bytes()))


def test_a_library_that_is_missing_or_too_large_is_refused(wheels, wheel_with, monkeypatch):
    with pytest.raises(SystemExit, match="ncz_plugins.whl lacks .*/libncz_cpu.so"):
        wheels.check_library(wheel_with(None))
    monkeypatch.setattr(wheels, "MOST_LIBRARY_BYTES", 1_000)
    with pytest.raises(SystemExit, match="more than 1,000"):
        wheels.check_library(wheel_with((ROOT / wheels.LIBRARY).read_bytes()))


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags,refused", [(["-s"], None), ([], r"has \.symtab: "), (["-g"], r"\.debug_info, .*\.symtab")]
)
def test_a_library_that_is_not_stripped_is_refused(wheels, wheel_with, tmp_path, flags, refused):
    (tmp_path / "library.cpp").write_text("int answer() { return 42; }\n")
    command = ["g++", "-shared", "-fPIC", *flags, "-o", "library.so", "library.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    wheel = wheel_with((tmp_path / "library.so").read_bytes())
    if refused is None:
        wheels.check_library(wheel)
        return
    with pytest.raises(SystemExit, match=refused):
        wheels.check_library(wheel)


def run(*command: str, folder, **environment: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ncz_plugins", folder / "ncz_plugins", ignore=ignored)
    return folder


@pytest.mark.processes
def test_a_source_distribution_holds_all_and_is_built_where_no_compiler_is(wheels, checkout, tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), folder=checkout)
    [source] = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")

    # Compilers that the environment names, too, are not there.
    name = run("-c", BUILD_WHEEL, folder=unpacked, PATH=str(nothing), CC="gcc", CXX="g++").splitlines()[-1]
    with zipfile.ZipFile(unpacked / name) as archive:
        held = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    package = checkout / "ncz_plugins"
    assert held >= {str(file.relative_to(checkout)) for file in package.rglob("*.*") if file.is_file()}
    run("-m", "twine", "check", "--strict", str(source), str(unpacked / name), folder=tmp_path)
    assert wheels.LIBRARY not in held and name.startswith("ncz_plugins-") and "-py3-none-" in name
    shown = run("-W", "ignore", "-m", "ncz_plugins", "info", folder=tmp_path / "installed", PATH=str(nothing))
    assert "reinstall ncz_plugins" in shown and "ok (in use)" in shown


class Addresses(HTMLParser):
    """Where the links and pictures of a page are."""

    def __init__(self):
        super().__init__()
        self.links, self.pictures = [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given["href"]] if tag == "a" else []
        self.pictures += [given[name] for name in ("src", "srcset") if name in given]


@pytest.mark.processes
@pytest.mark.parametrize("given", ["https://example.com/owner/name", "https://example.com/owner/name/", ""])
def test_what_the_page_on_pypi_names_is_in_the_repository(given, checkout):
    name, repository = run("-c", DESCRIBE, folder=checkout, REPOSITORY_URL=given).splitlines()[-1], given.rstrip("/")
    about = BytesParser().parsebytes((checkout / name / "METADATA").read_bytes())
    page = Addresses()
    page.feed(markdown.markdown(about.get_payload(decode=True).decode()))
    within = {"links": f"{repository}/blob/v{__version__}/", "pictures": f"{repository}/raw/v{__version__}/"}
    for kind, at in within.items():
        own = [each for each in getattr(page, kind) if not each.startswith("https://arxiv.org/")]
        assert bool(own) == bool(repository), f"{kind}: {own}"
        for address in own:
            assert address.startswith(at), address
            assert (ROOT / address.removeprefix(at).partition("#")[0]).is_file(), address
    urls = dict(each.split(", ") for each in about.get_all("Project-URL", []))
    assert set(urls) == ({"Source", "Changelog", "Issues"} if repository else set())
    assert all(url.startswith(repository) and "//" not in url.removeprefix("https://") for url in urls.values())
