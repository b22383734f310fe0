"""Schedules side by side: seconds of all-reduces, plain and by direct, ring and halving, on 8 and 16 ranks.

    sudo .venv/bin/python -m benchmarks.schedules [--ranks 8,16] [--links 100mbit,1gbit,far] [--json FILE]

Each rank is in a network namespace behind a link of its own: of the laboratory, or `far`, with a round trip of 50 ms
and no limit but that of the relay of `benchmarks.connections`. One communicator for each schedule, which take turns.
Seconds are the median over rounds of the slowest rank's. All tensors are compressed. What FILE has of other ranks and
links stays there. Wants root; `far` /dev/net/tun.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ncz_plugins
from benchmarks.connections import Way, relayed
from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import Node, link
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import emitter
from ncz_plugins.core.config import format_size
from ncz_plugins.core.whole_files import write_whole

SCHEDULES = ("direct", "ring", "halving")
SIZES = (128 << 10, 1 << 20, 16 << 20)
ROUNDS = 7  # the first does not count
LINKS_GBPS = {"100mbit": 0.1, "1gbit": 1.0, "far": 1.0}  # what the configuration says, for the choice of coders


def worker(gbps: float) -> None:
    """One rank: seconds of an all-reduce of each size by each schedule."""
    emit = emitter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = {"min_bytes": 0, "link_gbps": gbps, "connections": 1}
    communicators = {
        name: ncz_plugins.Communicator({"transport": transport | {"schedule": name}}) for name in SCHEDULES
    }
    tile = torch.from_numpy(np.random.default_rng(dist.get_rank()).laplace(size=1 << 18).astype(np.float32))
    for nbytes in SIZES:
        source = tile.repeat(-(-nbytes // tile.nbytes))[: nbytes // tile.itemsize]
        reduce = {"plain": dist.all_reduce} | {name: each.all_reduce for name, each in communicators.items()}
        seconds: dict[str, list[float]] = {name: [] for name in reduce}
        for _ in range(ROUNDS):
            for name, all_reduce in reduce.items():
                tensor = source.clone()
                dist.barrier()
                started = time.perf_counter()
                all_reduce(tensor)
                taken = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                seconds[name].append(taken.item())
        sent = {name: each.stats.total.wire_bytes for name, each in communicators.items()}
        emit({"bytes": nbytes, "seconds": {name: taken[1:] for name, taken in seconds.items()}, "sent": sent})
    for communicator in communicators.values():
        communicator.close()
    dist.barrier()
    dist.destroy_process_group()


def behind(name: str, ranks: int) -> AbstractContextManager[list[Node]]:
    """The nodes behind such links."""
    return relayed(Way(name, 0.0, 0.025), ranks) if name == "far" else link(ranks, name)


def measured(ranks: int, name: str) -> list[dict]:
    records: list[dict] = []
    with tempfile.TemporaryDirectory() as folder, behind(name, ranks) as nodes:
        command = [sys.executable, "-m", "benchmarks.schedules", "--worker", str(LINKS_GBPS[name])]
        run(command, ranks, Path(folder) / "records", nodes=nodes, on_record=records.append, timeout=300)
    return [{"ranks": ranks, "link": name} | record for record in records]


def table(records: list[dict]) -> Table:
    found = Table("ranks", "link", "size", "plain", *SCHEDULES)
    for record in records:
        taken = {name: median(seconds) for name, seconds in record["seconds"].items()}
        cells = [f"{1e3 * taken[name]:.0f} ms" if name in taken else "" for name in ("plain", *SCHEDULES)]
        found.add_row(str(record["ranks"]), record["link"], format_size(record["bytes"]), *cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16", metavar="NUMBERS")
    parser.add_argument("--links", default="100mbit,1gbit,far", metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    kept = options.json is not None and options.json.exists()
    records = json.loads(options.json.read_text())["records"] if kept else []
    for ranks in map(int, options.ranks.split(",")):
        for name in options.links.split(","):
            records = [each for each in records if (each["ranks"], each["link"]) != (ranks, name)]
            records += measured(ranks, name)
            Console().print(table(records[-len(SIZES) :]))
            if options.json:
                whole = {
                    "command": "python -m benchmarks.schedules --json FILE",
                    "versions": {"ncz_plugins": ncz_plugins.__version__, "torch": torch.__version__},
                    "machine": {"platform": platform.platform(), "cpu": machine.cpu()},
                    "records": records,
                }
                write_whole(options.json, (json.dumps(whole, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
