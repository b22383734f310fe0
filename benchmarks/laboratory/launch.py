"""Launcher of ranks behind links: in network namespaces, with the variables of torchrun and, on request, horovodrun."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ncz_plugins.cli.perf.launch import (
    end_process,
    ending_with_this_process,
    free_port,
    last_lines,
    meeting_point,
    of_rank,
    read_all,
    run_processes,
)
from ncz_plugins.core.errors import NczError

from .link import Node

ROOT = Path(__file__).resolve().parents[2]

_POLL_SECONDS = 0.1
_ENDING_SECONDS = 2  # for the server to end by itself before it is killed
_RENDEZVOUS_SECONDS = 60
_PORT = 29500  # for ranks in network namespaces, where every port is free


def run(
    command: list[str],
    ranks: int,
    records: Path,
    *,
    standard_input: str = "",
    nodes: list[Node] | None = None,
    ranks_per_node: int = 1,
    horovod: bool = False,
    environment: dict[str, str] | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    timeout: float,
) -> None:
    """Run `command` once per rank, and wait until all have ended.

    Args:
        command: the command and its arguments.
        ranks: number of ranks.
        nodes: nodes on which the ranks run; None: on this machine, over the loopback.
        ranks_per_node: number of ranks on each node.
        horovod: whether to start the server at which Horovod's ranks meet, so that `hvd.init()` works without
            horovodrun.
        environment: variables in addition to those of this process and of the launchers.

    For the other arguments and for errors see `ncz_plugins.cli.perf.launch.run_processes`.
    """
    commands = [placed(command, nodes, rank // ranks_per_node) for rank in range(ranks)]
    environments = environments_of(ranks, nodes, ranks_per_node, environment or {})
    with ExitStack() as stack:
        if horovod:
            own = stack.enter_context(_horovodrun(ranks, nodes, ranks_per_node))
            environments = [each | horovods for each, horovods in zip(environments, own)]
        run_processes(
            commands, environments, records, standard_input=standard_input, on_record=on_record, timeout=timeout
        )


def placed(command: list[str], nodes: list[Node] | None, index: int) -> list[str]:
    """The command that runs `command` on a node; the command itself if there are no nodes."""
    return nodes[index].command(command) if nodes else command


def environments_of(
    ranks: int, nodes: list[Node] | None, ranks_per_node: int, more: dict[str, str]
) -> list[dict[str, str]]:
    """Environment variables of each rank, as torchrun sets them, with `more`, which must not name the rank."""
    if nodes:
        interface, per_node = nodes[0].interface, ranks_per_node
        shared = meeting_point(nodes[0].address, _PORT, interface)
    else:
        interface, per_node = "lo", ranks
        shared = meeting_point("127.0.0.1", free_port(), interface)
    shared |= {"HOROVOD_GLOO_IFACE": interface} | more
    return [shared | of_rank(rank, ranks, per_node) for rank in range(ranks)]


@contextmanager
def _horovodrun(ranks: int, nodes: list[Node] | None, per_node: int) -> Iterator[list[dict[str, str]]]:
    """Context manager that runs the server at which Horovod's ranks meet, and yields the variables of each rank."""
    hosts = ",".join(f"{node.name}:{per_node}" for node in nodes) if nodes else f"localhost:{ranks}"
    command = [sys.executable, "-m", "benchmarks.laboratory.rendezvous", hosts, str(ranks)]
    with ExitStack() as stack:
        printed = stack.enter_context(tempfile.TemporaryFile("w+"))
        log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        server = subprocess.Popen(
            ending_with_this_process(placed(command, nodes, 0)),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(end_process, server)
        stack.callback(_let_end, server)
        deadline = time.monotonic() + _RENDEZVOUS_SECONDS
        while not (line := read_all(printed)).endswith("\n"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise NczError(f"Horovod's ranks can't meet: no server for them came up\n{last_lines(log)}")
            time.sleep(_POLL_SECONDS)
        received = json.loads(line)
        address = nodes[0].address if nodes else "127.0.0.1"
        meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(received["port"])}
        gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        yield [meeting | gloo | rank for rank in received["ranks"]]


def _let_end(process: subprocess.Popen) -> None:
    """Close the standard input of a process, and wait briefly for it to end."""
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)
