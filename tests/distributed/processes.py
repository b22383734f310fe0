"""Starts one real process per rank and never waits for ever."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import forking
import pytest
import torch
from repository import FORKED_RANKS

from benchmarks.laboratory.link import Node
from ncz_plugins.cli.perf.launch import free_port

# Where tensors may be. A GPU is shared by all ranks; machines of CI have none, `make gpu` is for those that do.
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
)
DEVICES = ["cpu", GPU]
WORKERS = Path(__file__).with_name("_workers")


@dataclass
class Finished:
    """One rank's process: its exit code, what it printed, and the JSON it left (None if it left none)."""

    returncode: int | None
    output: str
    result: object


def run(
    worker: str,
    world_size: int,
    folder: Path,
    *arguments: str,
    seconds: float = 120,
    imports: str = "ncz_plugins.core.communicator",
    environment: dict[str, str] | None = None,
) -> list[Finished]:
    """Run `_workers/WORKER.py` once per rank; every process is gone when this returns.

    The ranks are forks of one process, so that what takes long to import is imported once.

    A worker finds its rank, the world size and the meeting point in the environment, as under any
    launcher, and the file to write its result to in NCZ_TEST_RESULT.

    Args:
        imports: modules that the worker will import, separated by commas, none of which may start a thread.
    """
    forks = [FORKED_RANKS, imports, "--into", folder, "hosts", world_size, free_port(), WORKERS / f"{worker}.py"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    process = forking.start(
        [sys.executable, *map(str, forks), *arguments],
        cwd=Path.cwd(),
        env={**os.environ, **settings, **(environment or {})},
        log=folder / "fork.log",
    )
    try:
        process.wait(seconds)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    finally:
        forking.end(process)
    exits = folder / "exits.json"
    codes = [code for code, _ in json.loads(exits.read_text())] if exits.exists() else [None] * world_size
    finished = []
    for rank, code in enumerate(codes):
        log = folder / f"rank{rank}.log"
        output = log.read_text(errors="replace") if log.exists() else (folder / "fork.log").read_text()
        finished.append(Finished(code, output, _result(folder, rank)))
    assert not late, f"not done within {seconds} s:\n" + report(finished)
    return finished


def run_in_nodes(
    worker: str, world_size: int, folder: Path, *arguments: str, nodes: Sequence[Node], seconds: float = 120
) -> list[Finished]:
    """As `run`, on machines of a laboratory, equally many ranks on each."""
    started = []
    port = free_port()
    for rank in range(world_size):
        environment = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": nodes[0].interface,
            "RANK": str(rank),
            "NCZ_TEST_RESULT": str(folder / f"rank{rank}.json"),
        }
        log = open(folder / f"rank{rank}.log", "w+")
        command = [sys.executable, "-u", str(WORKERS / f"{worker}.py"), *arguments]
        command = nodes[rank * len(nodes) // world_size].command(command)
        started.append((subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log), log))
    deadline = time.monotonic() + seconds
    late = []
    for rank, (process, _) in enumerate(started):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for process, _ in started:
        process.kill()
        process.wait()
    finished = []
    for rank, (process, log) in enumerate(started):
        log.seek(0)
        finished.append(Finished(process.returncode, log.read(), _result(folder, rank)))
        log.close()
    assert not late, f"ranks {late} did not end within {seconds} s:\n" + report(finished)
    return finished


def _result(folder: Path, rank: int) -> object:
    file = folder / f"rank{rank}.json"
    return json.loads(file.read_text()) if file.exists() else None


def report(finished: list[Finished]) -> str:
    """What every rank printed, for the message of a failed assertion."""
    return "\n".join(f"--- rank {rank} exited with {f.returncode}\n{f.output}" for rank, f in enumerate(finished))


def results(finished: list[Finished]) -> list:
    """Every rank's result, once it is sure that all ended well."""
    assert all(f.returncode == 0 for f in finished), report(finished)
    return [f.result for f in finished]


def names(worker: str) -> list[str]:
    """The checks of a worker (see `_workers/checks.py`), which can't be imported without ranks to run it."""
    return re.findall(r"^@check\ndef (\w+)", (WORKERS / f"{worker}.py").read_text(), re.MULTILINE)


def passed(finished: list[Finished], name: str) -> None:
    """Fail unless the check of that name has run and passed on every rank; says what failed on which."""
    wrong = []
    for rank, each in enumerate(finished):
        if not isinstance(each.result, dict) or name not in each.result:
            wrong.append(f"--- rank {rank} exited with {each.returncode} and did not finish it\n{each.output}")
        elif each.result[name]:
            wrong.append(f"--- rank {rank}\n{each.result[name]}")
    assert not wrong, "\n".join(wrong)
