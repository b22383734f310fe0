"""Starts one real process per rank and never waits for ever."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ncz_plugins.cli.perf.link import Node

# Where tensors may be. A GPU is shared by all ranks; machines of CI have none, `make gpu` is for those that do.
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
)
DEVICES = ["cpu", GPU]
WORKERS = Path(__file__).with_name("_workers")


@dataclass
class Finished:
    """One rank's process: its exit code, what it printed, and the JSON it left (None if it left none)."""

    returncode: int
    output: str
    result: object


def run(
    worker: str, world_size: int, tmp_path: Path, *arguments: str, seconds: float = 120, nodes: Sequence[Node] = ()
) -> list[Finished]:
    """Run `_workers/WORKER.py` once per rank; every process is gone when this returns.

    Args:
        nodes: machines of a laboratory on which the ranks run, equally many on each; by default all run here.

    A worker finds its rank, the world size and the meeting point in the environment, as under any
    launcher, and the file to write its result to in NCZ_TEST_RESULT.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "NCCL_HOSTID": f"host-{rank}",  # as if on hosts of their own: several ranks may then share one GPU
            "NCZ_TEST_RESULT": str(tmp_path / f"rank{rank}.json"),
        }
        if nodes:
            environment |= {"MASTER_ADDR": nodes[0].address, "GLOO_SOCKET_IFNAME": nodes[0].interface}
        log = open(tmp_path / f"rank{rank}.log", "w+")
        command = [sys.executable, "-u", str(WORKERS / f"{worker}.py"), *arguments]
        if nodes:
            command = nodes[rank * len(nodes) // world_size].command(command)
        started.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
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
        result = tmp_path / f"rank{rank}.json"
        finished.append(
            Finished(process.returncode, log.read(), json.loads(result.read_text()) if result.exists() else None)
        )
        log.close()
    assert not late, f"ranks {late} did not end within {seconds} s:\n" + report(finished)
    return finished


def report(finished: list[Finished]) -> str:
    """What every rank printed, for the message of a failed assertion."""
    return "\n".join(f"--- rank {rank} exited with {f.returncode}\n{f.output}" for rank, f in enumerate(finished))


def results(finished: list[Finished]) -> list:
    """Every rank's result, once it is sure that all ended well."""
    assert all(f.returncode == 0 for f in finished), report(finished)
    return [f.result for f in finished]
