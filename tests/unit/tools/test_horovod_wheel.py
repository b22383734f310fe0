"""What decides whether a compiled Horovod can be taken from the cache, and what a failed build advises."""

import re

import pytest
from repository import ROOT

PARTS = {
    "horovod": "0.28.1",
    "torch": "2.13.0+cpu",
    "python": "cpython-311",
    "machine": "x86_64",
    "compiler_version": "g++ 12.2.0",
}


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bootstrap
    import horovod_wheel

    return bootstrap, horovod_wheel


@pytest.mark.parametrize("part", PARTS)
def test_another_part_is_another_folder(tools, part):
    key = tools[1].key
    assert key(**PARTS) == key(**PARTS)
    assert key(**PARTS) != key(**{**PARTS, part: "2.0.other"})


@pytest.mark.parametrize(
    ("torch", "standard"),
    [("2.6.0", 17), ("2.13.0+cpu", 17), ("2.14.0", 20), ("2.15.0+cu132", 20), ("2.16.0.dev20261101", 20), ("3.0", 20)],
)
def test_torch_decides_the_cxx_standard_and_the_folder_names_it(tools, torch, standard):
    assert tools[1].cxx_standard(torch) == standard
    assert f"-cxx{standard}-" in tools[1].key(**{**PARTS, "torch": torch})


def test_the_folder_has_no_character_that_breaks_the_build(tools):
    _, wheel = tools
    assert re.search(wheel.UNUSABLE, PARTS["torch"])
    assert not re.search(wheel.UNUSABLE, wheel.key(**PARTS))


def test_instruction_sets_only_where_they_exist(tools):
    arch_flags = tools[1].arch_flags
    assert arch_flags("x86_64") == arch_flags("AMD64") != ""
    assert arch_flags("aarch64") == ""


@pytest.mark.parametrize(
    ("makeflags", "expected"),
    [("", 4), ("-j2", 2), (" -j 3 --jobserver-auth=3,4", 3), ("s -- ARGS=-k", 4), (" -j --jobserver-auth=3,4", 4)],
)
def test_as_many_jobs_as_make_was_told(tools, makeflags, expected):
    assert tools[1].jobs(makeflags, cpus=4) == expected


def test_never_more_jobs_than_the_memory_bears_unasked(tools):
    _, wheel = tools
    assert wheel.jobs("", cpus=1000) == wheel.MAX_JOBS


def test_the_version_is_the_pinned_one(tools):
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"horovod=={tools[1].pinned_version(constraints)}" in constraints.splitlines()


def test_everything_that_is_missing_is_named_with_its_remedy(tools, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-compiler -m64")
    lacks = tools[1].missing(tmp_path)
    assert [name in lack for name, lack in zip(("my-compiler", "make", "Python.h"), lacks, strict=True)] == [True] * 3
    assert all("apt-get install" in lack for lack in lacks)


def test_nothing_is_missing_where_all_is_there(tools, monkeypatch, tmp_path):
    for name in ("g++", "make"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert tools[1].missing(tmp_path) == []


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "MAKEFLAGS=-j1"),
        ("ImportError: cannot import name 'mpi_lib_v2' from 'horovod.torch'", "remove its folder"),
        ("NewConnectionError: Failed to establish a new connection", "Check the network"),
        ("some other trouble", "lines above"),
    ],
)
def test_advice_for_a_failed_build(tools, output, advice):
    assert advice in tools[0].remedy(output)
