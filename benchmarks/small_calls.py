"""Times all-reduces that are too small to be compressed, beside those of torch.distributed.

    .venv/bin/python benchmarks/small_calls.py [--ranks 2 4] [--rounds 2000] [--json FILE]

Ranks are connected by this machine's loopback. Both kinds take turns, each after a barrier in a process group of its
own: one call by itself, and 50 in a row. Ranks leave a barrier some hundred microseconds apart, which is part of the
time of a call by itself. A round's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ncz_plugins import Communicator
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import emitter, run
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.version import __version__

SIZES = (4 << 10, 64 << 10)  # bytes
IN_A_ROW = 50
WARM_UP = 20  # rounds that are not counted
RANK = "--rank"  # the argument that the ranks are started with


def measure(rounds: int) -> None:
    """What each rank does. Rank 0 emits a record for every size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    between, emit = dist.new_group(), emitter()
    communicator = Communicator()
    kinds = {"plain": dist.all_reduce, "ncz": communicator.all_reduce}
    for size, in_a_row in product(SIZES, (1, IN_A_ROW)):
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        tensor = torch.zeros(size // 4)
        for number in range(-WARM_UP, max(1, rounds // in_a_row)):
            for name, reduce in kinds.items():
                dist.barrier(between)
                begun = time.perf_counter()
                for _ in range(in_a_row):
                    reduce(tensor)
                ended = time.perf_counter()
                if number >= 0:
                    seconds[name].append((ended - begun) / in_a_row)
        medians = {}
        for name, mine in seconds.items():
            slowest = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=between)
            medians[name] = 1e6 * statistics.median(slowest.tolist())
        case = {"ranks": dist.get_world_size(), "bytes": size, "in_a_row": in_a_row}
        emit(case | {f"{name}_us": us for name, us in medians.items()})
    assert list(communicator.stats.total.bypasses) == ["too small"]
    communicator.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument(RANK, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rounds)
        return 0
    records: list[dict] = []
    command = [sys.executable, __file__, RANK, "--rounds", str(arguments.rounds)]
    for ranks in arguments.ranks:
        with tempfile.NamedTemporaryFile() as followed:
            run(command, ranks, Path(followed.name), on_record=records.append, timeout=600)
    table = Table("ranks", "bytes", "calls in a row", "plain (us)", "ncz (us)", "ncz / plain")
    for each in records:
        ratio = each["ncz_us"] / each["plain_us"]
        times = (f"{each['plain_us']:.0f}", f"{each['ncz_us']:.0f}", f"{ratio:.2f}")
        table.add_row(str(each["ranks"]), f"{each['bytes']:,}", str(each["in_a_row"]), *times)
    Console().print(table)
    if arguments.json:
        versions = {"ncz_plugins": __version__, "torch": torch.__version__}
        found = {"command": " ".join(sys.argv), "versions": versions, "machine": machine.cpu(), "records": records}
        write_whole(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
