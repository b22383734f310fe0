"""Launcher of the ranks of a job on this machine, with a time-out.

Each rank gets the environment variables of torchrun and, on request, of horovodrun. When a function of this module
returns or raises, all its ranks have ended. If this process is killed, the kernel kills them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import IO, Any

from ...core.errors import NczError, UnsupportedError
from .link import Node

RECORDS = "NCZ_PERF_OUT"  # environment variable of rank 0: descriptor to which it writes JSON lines

_POLL_SECONDS = 0.1
_ENDING_SECONDS = 2  # for a process to end by itself before it is killed
_LOG_LINES = 20  # last lines of a failed rank's log that the error shows
_RENDEZVOUS_SECONDS = 60
_PORT = 29500  # for ranks in network namespaces, where every port is free
_FIRST_PORT = 10_000  # lower ports belong to well-known services


def run_ranks(
    ranks: int,
    specification: dict[str, Any],
    *,
    nodes: list[Node] | None = None,
    ranks_per_node: int = 1,
    horovod: bool = False,
    on_record: Callable[[dict[str, Any]], None],
    timeout: float,
) -> None:
    """Run `ncz_plugins.cli.perf.rank` once per rank.

    Args:
        ranks: number of ranks.
        specification: JSON document on the standard input of every rank.

    For the other arguments and for errors see `run`.
    """
    command = [sys.executable, "-m", "ncz_plugins.cli.perf.rank"]
    with tempfile.NamedTemporaryFile() as records:
        run(
            command,
            ranks,
            Path(records.name),
            standard_input=json.dumps(specification),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            horovod=horovod,
            on_record=on_record,
            timeout=timeout,
        )


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
        records: file that rank 0 writes JSON lines to, by this path or by the descriptor in NCZ_PERF_OUT. Emptied at
            the start.
        standard_input: standard input of every rank.
        nodes: nodes on which the ranks run; None: on this machine, over the loopback.
        ranks_per_node: number of ranks on each node.
        horovod: whether to start the server at which Horovod's ranks meet, so that `hvd.init()` works without
            horovodrun.
        environment: variables in addition to those of this process and of the launchers.
        on_record: called with each line of `records` as soon as it is written.
        timeout: time limit in seconds.

    Raises NczError if a rank fails or the time is over; the message ends with the last lines of the rank's log.
    Raises UnsupportedError if setpriv is missing.
    """
    if which("setpriv") is None:
        raise UnsupportedError("ranks are started by setpriv, which is not here: install util-linux, or use a launcher")
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        # The environment of each rank.
        output = stack.enter_context(records.open("w"))
        followed = stack.enter_context(records.open())
        shared = os.environ | _meeting_point(nodes) | (environment or {})
        own = [_torchrun(rank, ranks, ranks_per_node if nodes else ranks) for rank in range(ranks)]
        if horovod:
            each = stack.enter_context(_horovodrun(ranks, nodes, ranks_per_node))
            own = [a | b for a, b in zip(own, each)]
        own[0][RECORDS] = str(output.fileno())
        # Start the ranks, each with a log of its own.
        started = []
        for rank in range(ranks):
            placed = nodes[rank // ranks_per_node].command(command) if nodes else command
            given, log = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            given.write(standard_input)
            given.seek(0)
            process = subprocess.Popen(
                _ending_with_this_process(placed),
                env=shared | own[rank],
                stdin=given,
                stdout=log,
                stderr=log,
                pass_fds=[output.fileno()] if rank == 0 else [],
                start_new_session=True,  # Ctrl-C interrupts this process only, which then ends the ranks
            )
            stack.callback(_end, process)
            started.append((process, log))
        _follow(started, followed, on_record, deadline, timeout)


def emitter() -> Callable[[dict[str, Any]], None]:
    """Function with which a rank that `run` started writes records. It does nothing on ranks other than 0."""
    descriptor = os.environ.get(RECORDS)
    records = open(int(descriptor), "w", buffering=1, closefd=False) if descriptor else None

    def emit(record: dict[str, Any]) -> None:
        if records:
            print(json.dumps(record), file=records)

    return emit


# ------------------------------------------------------------------ the environment of a rank


def _meeting_point(nodes: list[Node] | None) -> dict[str, str]:
    """Environment variables that are the same on all ranks, as torchrun sets them."""
    if nodes:
        address, port, interface = nodes[0].address, _PORT, nodes[0].interface
    else:
        address, port, interface = "127.0.0.1", free_port(), "lo"
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "HOROVOD_GLOO_IFACE": interface,
        "OMP_NUM_THREADS": "1",
    }


def _torchrun(rank: int, ranks: int, per_node: int) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(min(per_node, ranks))}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks)} | local


@contextmanager
def _horovodrun(ranks: int, nodes: list[Node] | None, per_node: int) -> Iterator[list[dict[str, str]]]:
    """Context manager that runs the server at which Horovod's ranks meet, and yields the variables of each rank."""
    hosts = ",".join(f"{node.name}:{per_node}" for node in nodes) if nodes else f"localhost:{ranks}"
    command = [sys.executable, "-m", "ncz_plugins.cli.perf.rendezvous", hosts, str(ranks)]
    with ExitStack() as stack:
        printed = stack.enter_context(tempfile.TemporaryFile("w+"))
        log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        server = subprocess.Popen(
            _ending_with_this_process(nodes[0].command(command) if nodes else command),
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(_end, server)
        stack.callback(_let_end, server)
        deadline = time.monotonic() + _RENDEZVOUS_SECONDS
        while not (line := _read_all(printed)).endswith("\n"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise NczError(f"Horovod's ranks can't meet: no server for them came up\n{_end_of(log)}")
            time.sleep(_POLL_SECONDS)
        received = json.loads(line)
        address = nodes[0].address if nodes else "127.0.0.1"
        meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(received["port"])}
        gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        yield [meeting | gloo | rank for rank in received["ranks"]]


def free_port() -> int:
    """A free TCP port at which ranks can meet.

    Seconds pass before the first rank listens. Meanwhile the system may assign any port of its ephemeral range to other
    connections. So the port is chosen below that range if possible.
    """
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        first_ephemeral = 32768
    candidates = range(_FIRST_PORT, first_ephemeral)
    for port in [*random.SystemRandom().sample(candidates, min(100, len(candidates))), 0]:
        with socket.socket() as probe:
            with suppress(OSError):  # the port is in use
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
    raise NczError("no TCP port is free on 127.0.0.1 for the ranks to meet at")


# ------------------------------------------------------------------ from the start of the ranks to their end


def _ending_with_this_process(command: list[str]) -> list[str]:
    """The command, wrapped so that the kernel kills it when this thread ends (prctl(2), PR_SET_PDEATHSIG)."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


def _follow(
    started: list[tuple[subprocess.Popen, IO[str]]],
    records: IO[str],
    on_record: Callable[[dict[str, Any]], None],
    deadline: float,
    timeout: float,
) -> None:
    """Pass on records until all ranks have ended. Raises NczError if one fails or the time is over."""
    partial = ""
    while True:
        codes = [process.poll() for process, _ in started]  # polled before reading, so that no last line is missed
        *lines, partial = (partial + records.read()).split("\n")
        for line in lines:
            on_record(json.loads(line))
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise NczError("\n".join(f"rank {r} {_how(codes[r])}\n{_end_of(started[r][1])}" for r in failed))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            late = codes.index(None)
            raise NczError(
                f"rank {late} has not ended after {timeout:.0f} s: allow more time, or do less; the end of its log:\n"
                + _end_of(started[late][1])
            )
        time.sleep(_POLL_SECONDS)


def _how(code: int) -> str:
    """Words for the exit code of a process."""
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"{ended}; the end of its log:"


def _let_end(process: subprocess.Popen) -> None:
    """Close the standard input of a process, and wait briefly for it to end."""
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)


def _end(process: subprocess.Popen) -> None:
    """Kill a process and all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(log: IO[str]) -> str:
    return "\n".join(_read_all(log).splitlines()[-_LOG_LINES:])


def _read_all(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
