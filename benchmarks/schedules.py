"""Schedules side by side: seconds of all-reduces, plain and by direct, ring and halving, on 8 and 16 ranks.

    sudo .venv/bin/python -m benchmarks.schedules [--ranks 8,16] [--links 100mbit,far-1gbit] [--json FILE]

Each rank is in a network namespace behind a link of its own: of the laboratory, or far, with a round trip of 50 ms by
the relay of `benchmarks.connections`; what a rank sends is limited there, and not what it receives. One communicator
for each schedule, which take turns. Seconds are the median over rounds of the slowest rank's. All tensors are
compressed. What FILE has of other ranks and links stays there; the committed one becomes the table of its page. Wants
root; far links /dev/net/tun.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from benchmarks.laboratory.link import Node, bits_per_second, limit_sending, link
from benchmarks.pages import put_into
from benchmarks.performance import LINKS as PAGE_LINKS
from benchmarks.performance import rows_of
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import emitter
from ncz_plugins.core.config import format_size
from ncz_plugins.core.whole_files import write_whole

SCHEDULES = ("direct", "ring", "halving")
SIZES = (128 << 10, 1 << 20, 16 << 20)
ROUNDS = 7  # the first does not count
ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "benchmarks" / "results" / "schedules.json"
PAGE, MARKS = ROOT / "docs" / "results" / "planning.md", ("<!-- schedules -->", "<!-- end of schedules -->")
RATES = "100mbit", "1gbit"
LINKS = (*RATES, *(f"far-{rate}" for rate in RATES))


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


@contextmanager
def behind(name: str, ranks: int) -> Iterator[list[Node]]:
    """The nodes behind such links. Far ones are limited in what they send."""
    rate = name.removeprefix("far-")
    if name == rate:
        with link(ranks, rate) as nodes:
            yield nodes
        return
    with relayed(Way(name, 0.0, 0.025), ranks) as nodes:
        for node in nodes:
            limit_sending(node.pid, node.interface, bits_per_second(rate))
        yield nodes


def measured(ranks: int, name: str) -> list[dict]:
    records: list[dict] = []
    gbps = bits_per_second(name.removeprefix("far-")) / 1e9  # what the configuration says, for the choice of coders
    with tempfile.TemporaryDirectory() as folder, behind(name, ranks) as nodes:
        command = [sys.executable, "-m", "benchmarks.schedules", "--worker", str(gbps)]
        run(command, ranks, Path(folder) / "records", nodes=nodes, on_record=records.append, timeout=300)
    return [{"ranks": ranks, "link": name} | record for record in records]


def table(records: list[dict]) -> Table:
    found = Table("ranks", "link", "size", "plain", *SCHEDULES)
    for record in records:
        taken = {name: median(seconds) for name, seconds in record["seconds"].items()}
        cells = [f"{1e3 * taken[name]:.0f} ms" if name in taken else "" for name in ("plain", *SCHEDULES)]
        found.add_row(str(record["ranks"]), record["link"], format_size(record["bytes"]), *cells)
    return found


def markdown(records: list[dict]) -> str:
    """The table of the page: milliseconds."""
    columns = "plain", *SCHEDULES
    rows = []
    for record in sorted(records, key=lambda each: (each["ranks"], LINKS.index(each["link"]), each["bytes"])):
        milliseconds = [f"{1e3 * median(record['seconds'][name]):,.0f}" for name in columns]
        rate = record["link"].removeprefix("far-")
        where = f"far, {PAGE_LINKS[rate]}" if rate != record["link"] else PAGE_LINKS[rate]
        rows.append([str(record["ranks"]), where, format_size(record["bytes"]), *milliseconds])
    return rows_of(["ranks", "link", "size", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16", metavar="NUMBERS")
    parser.add_argument("--links", default=",".join(LINKS), metavar="NAMES")
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
    if options.json and options.json.resolve() == COMMITTED:
        put_into(PAGE, markdown(records), MARKS)


if __name__ == "__main__":
    main()
