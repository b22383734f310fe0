"""The folder for a machine with a GPU, torch and no network: what is in it, and that it is found there."""

import importlib
import os
import sys
import zipfile

import pytest
import torch
from repository import ROOT

HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def carry(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import carry

    monkeypatch.setattr(carry, "CARRIED", tmp_path / "carry")
    monkeypatch.setattr(carry, "UNPACKED", tmp_path / "unpacked")
    monkeypatch.setattr(carry, "NATIVE", tmp_path / "native")
    for folder in ("native", "carry/wheels", "carry/library", "carry/kernels"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "carry" / "python").write_text(HERE)
    for name in ("PYTHONPATH", "NCZ_CACHE"):  # which unpacking sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return carry


def test_packages_are_those_that_are_tested_without_those_of_torch(carry):
    pytest.importorskip("deepspeed")
    found = dict(package.split("==") for package in carry.packages(cupy=False))
    assert {"pydantic", "pydantic-core", "numpy", "rich", "pytest", "pytest-xdist", "typing-extensions"} <= found.keys()
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert not [
        name for name in found if name in ("torch", "triton", "ncz-plugins") or name.startswith(("nvidia", "cup"))
    ]


def test_what_was_carried_is_importable_here_and_in_other_processes(carry, tmp_path):
    with zipfile.ZipFile(tmp_path / "carry" / "wheels" / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_module.py", "ANSWER = 42")
    folder = tmp_path / "carry" / "library" / carry.sources_of_library()
    folder.mkdir()
    (folder / "libncz_cpu.so").write_text("built elsewhere")
    (tmp_path / "native" / "libncz_cpu.so").write_text("of older sources")
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "of an earlier time").touch()
    carry.unpack()
    assert importlib.import_module("carried_module").ANSWER == 42
    packages = str(tmp_path / "unpacked" / "packages")
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == packages
    assert os.environ["NCZ_CACHE"].startswith(str(tmp_path / "unpacked"))
    assert (tmp_path / "native" / "libncz_cpu.so").read_text() == "built elsewhere"
    assert not (tmp_path / "unpacked" / "of an earlier time").exists()


def test_a_library_of_other_sources_is_not_used(carry, tmp_path):
    folder = tmp_path / "carry" / "library" / carry.sources_of_library()
    folder.mkdir()
    (folder / "libncz_cpu.so").write_text("built elsewhere")
    (tmp_path / "native" / "changed.cpp").write_text("// changed")
    carry.unpack()
    assert not (tmp_path / "native" / "libncz_cpu.so").exists()


def test_what_is_for_another_python_is_refused_with_the_command_that_makes_the_right_one(carry, tmp_path):
    (tmp_path / "carry" / "python").write_text("2.7")
    with pytest.raises(SystemExit, match=f"for Python 2.7, and this is {HERE}: make carry .*--python {HERE}"):
        carry.unpack()


def test_carried_kernels_are_taken_for_compiled_ones(carry, monkeypatch, tmp_path, capsys):
    pytest.importorskip("cupy")
    from ncz_plugins.kernels.cuda import nvrtc
    from ncz_plugins.kernels.format import DTYPES

    monkeypatch.setenv("NCZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc.nvrtc, "getVersion", lambda: (99, 0))  # that there is another compiler does not matter
    for dtype in DTYPES:
        carry.file_of(dtype, "sm_90").write_bytes(b"kernels of " + str(dtype).encode())
    carry.prepare_kernels("sm_90")
    assert nvrtc.compiled(torch.float32, "sm_90") == b"kernels of torch.float32"
    assert capsys.readouterr().out.count(": carried") == len(DTYPES)


def test_kernels_of_other_sources_have_another_name(carry, monkeypatch):
    pytest.importorskip("cupy")
    from ncz_plugins.kernels.cuda import nvrtc

    name = carry.file_of(torch.float32, "sm_90").name
    monkeypatch.setattr(nvrtc, "_digest_of_sources", lambda: "other")
    assert carry.file_of(torch.float32, "sm_90").name != name
