"""Launcher of ranks on this machine, with a time-out.

Each rank gets the environment variables of torchrun. When a function of this module returns or raises, all its ranks
have ended. If this process is killed, the kernel kills them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import which
from typing import IO, Any

from ...core.errors import NczError, UnsupportedError

RECORDS = "NCZ_PERF_OUT"  # environment variable of rank 0: descriptor to which it writes JSON lines

_POLL_SECONDS = 0.1
_LOG_LINES = 20  # last lines of a failed rank's log that the error shows
_FIRST_PORT = 10_000  # lower ports belong to well-known services


def run(
    command: list[str],
    ranks: int,
    records: Path,
    *,
    standard_input: str = "",
    environment: dict[str, str] | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    timeout: float,
) -> None:
    """Run `command` once per rank over the loopback, and wait until all have ended.

    Args:
        command: the command and its arguments.
        ranks: number of ranks.
        environment: variables in addition to those of this process and of torchrun.

    For the other arguments and for errors see `run_processes`.
    """
    shared = meeting_point("127.0.0.1", free_port(), "lo") | (environment or {})
    environments = [shared | of_rank(rank, ranks, ranks) for rank in range(ranks)]
    commands = [command] * ranks
    run_processes(commands, environments, records, standard_input=standard_input, on_record=on_record, timeout=timeout)


def run_processes(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    records: Path,
    *,
    standard_input: str = "",
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    timeout: float,
) -> None:
    """Run one command for each rank, and wait until all have ended.

    Args:
        commands: command of each rank.
        environments: variables of each rank, in addition to those of this process.
        records: file that rank 0 writes JSON lines to, by this path or by the descriptor in NCZ_PERF_OUT. Emptied at
            the start.
        standard_input: standard input of every rank.
        on_record: called with each line of `records` as soon as it is written.
        timeout: time limit in seconds.

    Raises NczError if a rank fails or the time is over; the message ends with the last lines of the rank's log.
    Raises UnsupportedError if setpriv is missing.
    """
    if which("setpriv") is None:
        raise UnsupportedError("ranks are started by setpriv, which is not here: install util-linux, or use a launcher")
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        output = stack.enter_context(records.open("w"))
        followed = stack.enter_context(records.open())
        # Start the ranks, each with a log of its own. Only rank 0 has the descriptor of the records.
        started = []
        for rank, (command, environment) in enumerate(zip(commands, environments)):
            given, log = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            given.write(standard_input)
            given.seek(0)
            process = subprocess.Popen(
                ending_with_this_process(command),
                env=os.environ | environment | ({RECORDS: str(output.fileno())} if rank == 0 else {}),
                stdin=given,
                stdout=log,
                stderr=log,
                pass_fds=[output.fileno()] if rank == 0 else [],
                start_new_session=True,  # Ctrl-C interrupts this process only, which then ends the ranks
            )
            stack.callback(end_process, process)
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


def meeting_point(address: str, port: int, interface: str) -> dict[str, str]:
    """Environment variables that are the same on all ranks, as torchrun sets them."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
    }


def of_rank(rank: int, ranks: int, per_node: int) -> dict[str, str]:
    """Environment variables of one rank, as torchrun sets them."""
    local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(min(per_node, ranks))}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks)} | local


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


def ending_with_this_process(command: list[str]) -> list[str]:
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
            raise NczError("\n".join(f"rank {r} {_how(codes[r])}\n{last_lines(started[r][1])}" for r in failed))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            late = codes.index(None)
            raise NczError(
                f"rank {late} has not ended after {timeout:.0f} s: allow more time, or do less; the end of its log:\n"
                + last_lines(started[late][1])
            )
        time.sleep(_POLL_SECONDS)


def _how(code: int) -> str:
    """Words for the exit code of a process."""
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"{ended}; the end of its log:"


def end_process(process: subprocess.Popen) -> None:
    """Kill a process and all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: IO[str]) -> str:
    """The last lines of a log, as errors show them."""
    return "\n".join(read_all(log).splitlines()[-_LOG_LINES:])


def read_all(file: IO[str]) -> str:
    """All that was written to a file so far."""
    file.seek(0)
    return file.read()
