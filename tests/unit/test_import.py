"""`import ncz_plugins` needs nothing but torch and numpy; what takes more says so."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from repository import ROOT

import ncz_plugins

OPTIONAL = {"pydantic", "yaml", "rich", "deepspeed", "horovod", "cupy"}

PROGRAM = """
import sys

class Absent:
    '''Makes the named packages look as if they were not installed.'''
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import ncz_plugins

assert ncz_plugins.__version__
assert issubclass(ncz_plugins.ConfigError, ncz_plugins.NczError)
assert "Config" in dir(ncz_plugins) and "Communicator" in dir(ncz_plugins)
assert not ({optional!r} | {{"torch", "numpy"}}) & set(sys.modules)
try:
    ncz_plugins.Config
except ImportError as error:
    print(error)
else:
    raise SystemExit("Config was imported without pydantic")
"""


@pytest.mark.processes
def test_import_needs_none_of_the_optional_packages():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(optional=OPTIONAL)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    package = done.stdout.split("'")[1]
    assert package in OPTIONAL
    assert done.stdout.strip() == (
        f"ncz_plugins.Config needs the package '{package}', which is not installed; "
        "`pip install ncz_plugins` installs all it needs"
    )


# ------------------------------------------------------------------ without a C++ compiler


def run(*command: str, folder, **environment: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NCZ_CPU_KERNELS")} | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_an_install_without_a_compiler_says_so_when_imported(tmp_path):
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ncz_plugins", tmp_path / "ncz_plugins", ignore=ignored)
    twice = "import ncz_plugins; import ncz_plugins; ncz_plugins.NczError"
    done = run(sys.executable, "-c", twice, folder=tmp_path)
    assert done.returncode == 0 and done.stderr.count("Install a C++17 compiler") == 1, done.stderr
    assert not run(sys.executable, "-c", twice, folder=tmp_path, NCZ_CPU_KERNELS="reference").stderr
    assert not run(sys.executable, "-c", twice, folder=ROOT).stderr


@pytest.mark.processes
def test_a_build_without_a_compiler_leaves_no_library_of_an_earlier_one(tmp_path):
    for folder in ("cpu", "common"):
        shutil.copytree(ROOT / "ncz_plugins" / "kernels" / folder, tmp_path / "ncz_plugins" / "kernels" / folder)
    for name in ("setup.py", "README.md", "ncz_plugins/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    stale = tmp_path / "built" / "ncz_plugins" / "kernels" / "cpu" / "libncz_cpu.so"
    stale.parent.mkdir(parents=True)
    stale.write_text("of other sources")
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", "built"]
    done = run(*build, folder=tmp_path, CC="/no/compiler", CXX="/no/compiler")
    assert done.returncode == 0 and "libncz_cpu.so could not be built" in done.stderr + done.stdout, done
    assert not stale.exists()


# ------------------------------------------------------------------ names


def test_everything_that_is_exported_exists():
    for name in ncz_plugins.__all__:
        assert getattr(ncz_plugins, name) is not None
        assert name in dir(ncz_plugins)
    from ncz_plugins.core.config import Config
    from ncz_plugins.core.training.policy import ParameterSlice

    assert ncz_plugins.Config is Config
    assert ncz_plugins.ParameterSlice is ParameterSlice
    assert ncz_plugins.decompress(ncz_plugins.compress(torch.zeros(3))).tolist() == [0, 0, 0]


def test_what_a_training_uses_is_exported():
    from ncz_plugins import Training, recording, scalars
    from ncz_plugins.core.runtime import trace
    from ncz_plugins.core.training import metrics, state

    assert (Training, recording, scalars) == (state.Training, trace.recording, metrics.scalars)


FIRST = """
import sys

for name in {names!r}:
    for module in [module for module in sys.modules if module.partition(".")[0] == "ncz_plugins"]:
        del sys.modules[module]
    exec(f"from ncz_plugins import {{name}}")
"""


def test_every_name_can_be_the_first_one_imported():
    program = FIRST.format(names=sorted(ncz_plugins._LAZY))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_documentation_imports_public_names_only():
    """`from ncz_plugins import a, b` in README.md and docs/: each of these is in `__all__`, or was before."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {
        name.strip()
        for file in files
        for names in re.findall(r"from ncz_plugins import ([\w, ]+)", file.read_text())
        for name in names.split(",")
    }
    assert "Communicator" in found
    assert found <= set(ncz_plugins.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'ncz_plugins' has no attribute 'Confg'"):
        _ = ncz_plugins.Confg


def test_the_errors_are_one_family():
    errors = [getattr(ncz_plugins, name) for name in ncz_plugins.__all__ if name.endswith("Error")]
    assert len(errors) == 11
    assert all(issubclass(error, ncz_plugins.NczError) and error.__doc__ for error in errors)
    assert issubclass(ncz_plugins.ConfigError, ValueError) and issubclass(ncz_plugins.BoundError, ValueError)
    assert issubclass(ncz_plugins.UnsupportedError, TypeError)
