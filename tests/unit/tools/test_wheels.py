"""What `make wheels` publishes: a library that is not too large, and a source distribution that lacks nothing."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from repository import ROOT

# All that the package is built from.
SOURCES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# As pip builds a wheel from a source distribution.
BUILD_WHEEL = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import wheels

    return wheels


def test_the_library_is_small_enough_to_be_published(wheels):
    assert (ROOT / wheels.LIBRARY).stat().st_size <= wheels.MOST_LIBRARY_BYTES


def run(*command: str, folder, **environment: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
def test_a_source_distribution_holds_all_and_is_built_where_no_compiler_is(wheels, tmp_path):
    checkout, nothing = tmp_path / "checkout", tmp_path / "nothing"
    checkout.mkdir()
    nothing.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, checkout)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ncz_plugins", checkout / "ncz_plugins", ignore=ignored)
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
    assert wheels.LIBRARY not in held and name.startswith("ncz_plugins-") and "-py3-none-" in name
    shown = run("-W", "ignore", "-m", "ncz_plugins", "info", folder=tmp_path / "installed", PATH=str(nothing))
    assert "reinstall ncz_plugins" in shown and "ok (in use)" in shown
