"""Forks of processes that are kept: each is as a process of its own, and what goes wrong is told."""

import os
import subprocess
import sys

import forking
import pytest
from repository import FORKED_RANKS

PROGRAM = """
import os, sys
print(os.getcwd(), os.environ.get("NCZ_CONFIG"), os.environ.get("OTHER"), os.getsid(0), sys.argv[1:], flush=True)
if sys.argv[1] == "stay":
    sys.stdin = open(os.pipe()[0])
    sys.stdin.read()
sys.exit(sys.argv[1] == "fail")
"""


@pytest.fixture
def start(tmp_path):
    (program := tmp_path / "program.py").write_text(PROGRAM)

    def started(argument: str, modules: str = "json", **environment: str) -> forking.Fork:
        command = [sys.executable, str(FORKED_RANKS), modules, "torch", "1", "0", str(program), argument]
        return forking.start(command, cwd=tmp_path, env={**os.environ, **environment}, log=tmp_path / "log")

    return started


def test_a_fork_has_what_its_launch_says_and_nothing_of_the_one_before(start, tmp_path):
    for config, other, argument, status in [("a", "1", "succeed", 0), ("b", "1", "fail", 1), (None, "2", "succeed", 0)]:
        environment = {"OTHER": other} | ({"NCZ_CONFIG": config} if config else {})
        fork = start(argument, **environment)
        assert fork.wait(60) == status
        assert (tmp_path / "log").read_text() == f"{tmp_path} {config} {other} {fork.pid} ['{argument}']\n"


def test_one_that_stays_is_ended_and_its_process_serves_on(start):
    fork = start("stay")
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.1)
    forking.end(fork)
    assert fork.returncode < 0
    assert start("succeed").wait(60) == 0


def test_a_module_that_is_not_there_is_named_every_time(start):
    for _ in range(2):
        with pytest.raises(AssertionError, match="No module named 'ncz_none'"):
            start("succeed", modules="ncz_none")
