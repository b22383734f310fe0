"""Starts ranks that share one GPU, each as if on a host of its own, so that NCCL sends through sockets."""

from __future__ import annotations

import os
import subprocess
import time

from ncz_plugins.cli.perf.launch import free_port


def run_ranks(command: list[str], ranks: int, seconds: float, environment: dict[str, str]) -> list[int]:
    """Run a command once for each rank, and return their exit codes. All are gone at the end.

    Raises subprocess.TimeoutExpired.
    """
    port, started = free_port(), []
    for rank in range(ranks):
        of_rank = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"ncz-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        started.append(subprocess.Popen(command, env=os.environ | of_rank | environment))
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
