"""What it takes to open communicators: many ranks on one machine, and many communicators over two.

    .venv/bin/python -m benchmarks.opening [--ranks 16 64 256] [--communicators 100]
    .venv/bin/python -m benchmarks.opening --ranks 1024 --communicators 0       # on a machine that does nothing else

Ranks are forks of this process, which has imported torch once, and meet at a TCPStore, without process groups of their
own. Writes benchmarks/results/opening.json, where rows of other numbers of ranks stay, and the table of
docs/results/planning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.pages import put_into, write_figures
from ncz_plugins import Communicator

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = ROOT / "benchmarks" / "results" / "opening.json"
PAGE, MARKS = ROOT / "docs" / "results" / "planning.md", ("<!-- opening -->", "<!-- end of opening -->")
SECONDS = {"open": "s to open", "first call": "first call", "second call": "second"}  # of the slowest rank
TAKEN = {"descriptors at first": "descriptors", "descriptors": "with calls", "threads": "threads", "megabytes": "MB"}
_SECONDS = 300
_ELEMENTS = 1 << 18  # of the all_reduce: 1 MiB
_CONFIG = {"transport": {"min_bytes": 0, "timeout_seconds": _SECONDS, "link_gbps": 1, "hierarchy": "off"}}


class Group(dist.ProcessGroup):
    """The process group of a rank without connections of its own."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "none"


class Used(NamedTuple):
    """What a process has: open descriptors, threads, and MB of memory that it shares with no other one."""

    descriptors: int
    threads: int
    megabytes: float

    @classmethod
    def now(cls) -> Used:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        [dirty] = [line for line in lines if line.startswith("Private_Dirty")]
        count = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        return cls(*count, int(dirty.split()[1]) / 1024)

    def since(self, before: Used) -> Used:
        return Used(*(now - then for now, then in zip(self, before)))


def open_and_call(rank: int, ranks: int, communicators: int, port: int) -> dict[str, float]:
    """Open communicators on this rank, each of which makes two calls. Returns seconds, and what it has taken."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=_SECONDS), wait_for_workers=False)
    before, started = Used.now(), time.perf_counter()
    opened = [
        Communicator(_CONFIG, Group(rank, ranks), store=dist.PrefixStore(f"{number}", store))
        for number in range(communicators)
    ]
    seconds, at_first = time.perf_counter() - started, Used.now().since(before)
    calls = []
    for _ in range(2):
        for each in opened:
            started = time.perf_counter()
            each.all_reduce(torch.full((_ELEMENTS,), float(rank)))
            calls.append(time.perf_counter() - started)
    used = Used.now().since(before)
    first, second = calls[: len(opened)], calls[len(opened) :]
    found = {"open": seconds, "first call": median(first), "second call": median(second)}
    found |= {"descriptors at first": at_first.descriptors, **used._asdict()}
    # Rank 0 serves the store until the last rank is done.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < ranks:
        time.sleep(0.1)
    return found


def measured(ranks: int, communicators: int) -> list[dict[str, float]]:
    """What each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                found = open_and_call(rank, ranks, communicators, port)
                Path(folder, f"{rank}").write_text(json.dumps(found))
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            sys.exit("a rank failed: see above")
        return [json.loads(Path(folder, f"{rank}").read_text()) for rank in range(ranks)]


def record_of(ranks: int, communicators: int) -> dict[str, Any]:
    """Seconds of the slowest rank, and medians of what ranks take. Rank 0 serves a store."""
    found = measured(ranks, communicators)
    record: dict[str, Any] = {"ranks": ranks, "communicators": communicators}
    record |= {name: max(each[name] for each in found) for name in SECONDS}
    return record | {name: median(each[name] for each in found) for name in TAKEN}


def markdown(records: list[dict[str, Any]]) -> str:
    """A row for each number of ranks and communicators."""
    from benchmarks.performance import rows_of

    rows = []
    for each in records:
        cells = [f"{each[name]:.2g}" for name in SECONDS] + [f"{each[name]:.0f}" for name in TAKEN]
        rows.append([f"{each['ranks']:,}", f"{each['communicators']}", *cells])
    return rows_of(["ranks", "communicators", *SECONDS.values(), *TAKEN.values()], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--communicators", type=int, default=100, help="over two ranks; 0: only one (default: 100)")
    arguments = parser.parse_args()
    wanted = [(ranks, 1) for ranks in arguments.ranks]
    wanted += [(2, arguments.communicators)] if arguments.communicators else []
    known = json.loads(NUMBERS.read_text())["found"] if NUMBERS.exists() else []
    found = {(each["ranks"], each["communicators"]): each for each in known}
    for ranks, communicators in wanted:
        found[ranks, communicators] = record_of(ranks, communicators)
        print(found[ranks, communicators], flush=True)
    records = sorted(found.values(), key=lambda each: (each["communicators"], each["ranks"]))
    write_figures(NUMBERS.name, ["python", "-m", "benchmarks.opening"], {}, None, found=records)
    put_into(PAGE, markdown(records), MARKS)


if __name__ == "__main__":
    main()
