"""Starts the ranks of a job on this machine, as a launcher would on several, and never waits for ever.

Each rank gets the environment variables of torchrun and, if asked for, of horovodrun. All ranks are gone when a
function of this module returns or raises, and the kernel ends them if this process itself is killed.
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

RECORDS = "NCZ_PERF_OUT"  # rank 0 finds the number of a file descriptor here, to write JSON lines to

_POLL_SECONDS = 0.1
_ENDING_SECONDS = 2
_LOG_LINES = 20  # of a failed rank's log, shown in the error
_RENDEZVOUS_SECONDS = 60
_PORT = 29500  # for ranks with nodes of their own, where every port is free
_FIRST_PORT = 10_000  # below are those of well-known services


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
    """Run `ncz_plugins.cli.perf.rank` once per rank, each with the specification as JSON on its standard input.

    For the rest, and for what is raised, see `run`.
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
    """Run `command` once per rank to its end.

    Args:
        records: file that is emptied, then followed: `on_record` is called with each line of JSON that rank 0 writes,
            to this path or to the descriptor that NCZ_PERF_OUT names, as soon as it is there.
        standard_input: what every rank reads there.
        nodes: where the ranks run, `ranks_per_node` on each; by default all here, connected by the loopback.
        horovod: also let Horovod's ranks meet, so that `hvd.init()` works without horovodrun.
        environment: variables in addition to those of this process and of the launchers.
        timeout: seconds for all of it.

    Raises NczError if a rank fails or the time is over; the message ends with the last lines that the rank printed.
    Raises UnsupportedError where setpriv is missing.
    """
    if which("setpriv") is None:
        raise UnsupportedError("ranks are started by setpriv, which is not here: install util-linux, or use a launcher")
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        output = stack.enter_context(records.open("w"))
        followed = stack.enter_context(records.open())
        shared = os.environ | _meeting_point(nodes) | (environment or {})
        own = [_torchrun(rank, ranks, ranks_per_node if nodes else ranks) for rank in range(ranks)]
        if horovod:
            each = stack.enter_context(_horovodrun(ranks, nodes, ranks_per_node))
            own = [a | b for a, b in zip(own, each)]
        own[0][RECORDS] = str(output.fileno())
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
                start_new_session=True,  # Ctrl-C is for this process, which then ends them
            )
            stack.callback(_end, process)
            started.append((process, log))
        _follow(started, followed, on_record, deadline, timeout)


def emitter() -> Callable[[dict[str, Any]], None]:
    """The function with which a rank that `run` started emits records. It does nothing on ranks other than 0."""
    descriptor = os.environ.get(RECORDS)
    records = open(int(descriptor), "w", buffering=1, closefd=False) if descriptor else None

    def emit(record: dict[str, Any]) -> None:
        if records:
            print(json.dumps(record), file=records)

    return emit


# ------------------------------------------------------------------ the environment of a rank


def _meeting_point(nodes: list[Node] | None) -> dict[str, str]:
    """The environment variables that are the same for all ranks, as torchrun sets them."""
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
    """Each rank's variables, while the server is up at which Horovod's ranks meet."""
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
    """A TCP port on which nothing listens here, for ranks to meet at.

    The system hands out ports from a range of its own to every connection and every listener that names none, and
    seconds pass before the first rank listens. So the port is from below that range, where there is room.
    """
    try:
        first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        first_handed_out = 32768
    candidates = range(_FIRST_PORT, first_handed_out)
    for port in [*random.SystemRandom().sample(candidates, min(100, len(candidates))), 0]:
        with socket.socket() as probe:
            with suppress(OSError):  # it is taken
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
    raise NczError("no TCP port is free on 127.0.0.1 for the ranks to meet at")


# ------------------------------------------------------------------ from the start of the ranks to their end


def _ending_with_this_process(command: list[str]) -> list[str]:
    """The command, killed by the kernel when the thread that starts it ends (prctl(2), PR_SET_PDEATHSIG)."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


def _follow(
    started: list[tuple[subprocess.Popen, IO[str]]],
    records: IO[str],
    on_record: Callable[[dict[str, Any]], None],
    deadline: float,
    timeout: float,
) -> None:
    """Hand on the records until all ranks have ended well; NczError if that does not come to pass."""
    partial = ""
    while True:
        codes = [process.poll() for process, _ in started]  # asked before reading, so that no last line is missed
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
    """How a process ended, for people."""
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"{ended}; the end of its log:"


def _let_end(process: subprocess.Popen) -> None:
    """Let a process that reads its standard input to the end come to its own."""
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)


def _end(process: subprocess.Popen) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(log: IO[str]) -> str:
    return "\n".join(_read_all(log).splitlines()[-_LOG_LINES:])


def _read_all(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
