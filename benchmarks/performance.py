"""The tables of docs/results/performance.md, from committed results.

    .venv/bin/python -m benchmarks.performance

Each stands between two comments with its name, and a test compares page and files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.pages import put_into
from ncz_plugins.cli.output import duration
from ncz_plugins.core.config import format_size

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results" / "performance.md"
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unlimited": "no limit"}
PEERS = {
    "plain": "plain gloo",
    "ncz": "**ncz**",
    "fp16": "fp16",
    "ddp-int8": "DDP's 8-bit hook",
    "ddp-powersgd-1": "DDP's PowerSGD, rank 1",
    "hivemind": "hivemind, 8 bits",
    "horovod-fp16": "Horovod, fp16",
    "zstd": "zstd around all-gather",
}
STEPS = (  # file, framework, its name in the table
    ("end-to-end", "DeepSpeed", "DeepSpeed, ZeRO 2"),
    ("end-to-end-weights", "DeepSpeed in bf16", "the same in bf16"),
    ("end-to-end-zero-3", "DeepSpeed, ZeRO 3", "DeepSpeed, ZeRO 3, bf16"),
    ("end-to-end", "Horovod", "Horovod"),
    ("end-to-end-ddp", "DDP", "DDP"),
    ("end-to-end-fsdp", "FSDP2", "FSDP2"),
)
HALF = "bf16", "fp16"  # names of runs with 16 bits

Record = dict[str, Any]


def read(name: str) -> Record:
    """A committed file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(heading: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = False) -> str:
    """A table as Markdown; `numbers`: all columns but the first stand to the right."""
    heading = list(heading)
    lines = [heading, ["---", *["---:" if numbers else "---"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def by_cell(name: str) -> dict[tuple[str, int], dict[str, Record]]:
    """What `ncz perf` measured: by link and bytes, then by peer."""
    cells: dict[tuple[str, int], dict[str, Record]] = {}
    for record in read(name)["records"]:
        cells.setdefault((record["link"], record["size"]), {})[record["peer"]] = record
    return cells


def factor(record: Record) -> str:
    """How many times as fast as plain; bold where the call was compressed."""
    text = f"{record['speedup']:.2f}"
    return f"**{text}**" if record["ratio"] and record["ratio"] > 1.5 else text


def by_default() -> str:
    """All-reduces of all sizes over all links."""
    rows = []
    for ranks in (2, 4):
        cells = by_cell(f"perf-default-{ranks}-ranks")
        for size in sorted({size for _, size in cells}):
            rows.append([str(ranks), format_size(size), *(factor(cells[link, size]["ncz"]) for link in LINKS)])
    return rows_of(["ranks", "size", *LINKS.values()], rows)


def all_to_all() -> str:
    """Exchanges of activations, with the casts beside ours."""
    links = [link for link in LINKS if link != "10gbit"]
    rows = []
    for ranks in (2, 4, 8):
        cells = by_cell(f"perf-all-to-all-{ranks}-ranks")
        for size in sorted({size for _, size in cells}):
            found = [cells[link, size] for link in links]
            texts = [
                ", ".join([factor(each["ncz"]), *(factor(each[cast]) for cast in ("fp16", "fp8"))]) for each in found
            ]
            rows.append([str(ranks), format_size(size), *texts])
    first, *others = (LINKS[link] for link in links)
    return rows_of(["ranks", "size", f"{first}: ours, fp16, FP8", *others], rows)


def other_ways() -> str:
    """64 MiB at 1 Gbit/s by everything that others offer."""
    found = [{r["peer"]: r for r in read(f"perf-1gbit-{ranks}-ranks")["records"]} for ranks in (2, 4)]
    rows = []
    for peer, words in PEERS.items():
        measured = [each.get(peer) for each in found]
        errors = dict.fromkeys(f"{record['error']:.2g}".replace("e-0", "e-") for record in measured if record)
        times = [duration(record["time_us"] / 1e6) if record else "" for record in measured]
        rows.append([words, ", ".join(errors), *(f"**{t}**" if peer == "ncz" else t for t in times)])
    return rows_of(["", "error", "2 ranks", "4 ranks"], rows)


def small_calls() -> str:
    """Plain calls below the smallest size that is compressed."""
    cells: dict[tuple[int, int], dict[int, Record]] = {}
    for record in read("small-calls")["records"]:
        cells.setdefault((record["ranks"], record["bytes"]), {})[record["in_a_row"]] = record
    rows = []
    for (ranks, size), found in cells.items():
        texts = [f"{each['plain_us'] / 1e3:.2f}, {each['ncz_us'] / 1e3:.2f} ms" for _, each in sorted(found.items())]
        rows.append([str(ranks), format_size(size), *texts])
    return rows_of(["ranks", "size", "one call: gloo, ours", "50 in a row, each: gloo, ours"], rows)


def connections() -> str:
    """256 MiB by one and by several connections."""
    chosen = [record for record in read("connections")["records"] if record["bytes"] == 1 << 28]
    rows = [[r["way"], *(duration(r["seconds"][count]) for count in ("1", "4", "auto"))] for r in chosen]
    return rows_of(["", "1", "4", "auto"], rows)


def steps() -> str:
    """A step of training under each framework."""
    rows = []
    for file, framework, words in STEPS:
        runs = {run["name"]: run for run in read(file)["runs"] if run["framework"] == framework}
        half = next((runs[name] for name in HALF if name in runs), None)
        ours = [runs.get("ncclz"), runs.get("weights too")]
        factors = [f"{run['speed_up']:.2f}" if run else "" for run in (half, *ours)]
        sent = [f"{run['bytes_per_step'] / 1e6:.0f}" for run in (runs["plain"], *ours) if run]
        rows.append([words, f"{runs['plain']['step_seconds']:.2f} s", *factors, ", ".join(sent) + " MB"])
    weights = "[weights](../guides/weights.md) too"
    return rows_of(["", "plain", "16 bits", "ncclz", weights, "sent: plain, ncclz, weights too"], rows)


def experts() -> str:
    """A step with experts on other ranks."""
    names = "plain", "bf16", "fp8", "ncclz"
    runs = {run["name"]: run for run in read("end-to-end-experts")["runs"]}
    sent = ", ".join(f"{runs[name]['bytes_per_step'] / 1e6:.1f}" for name in names)
    times = [f"{runs['plain']['step_seconds']:.2f} s", *(f"{runs[name]['speed_up']:.2f}" for name in names[1:])]
    heading = "plain", "bf16", "FP8", "ncclz"
    return rows_of([*heading, "sent: " + ", ".join(heading)], [[*times, sent + " MB"]])


TABLES = {
    "default": by_default,
    "other ways": other_ways,
    "small calls": small_calls,
    "connections": connections,
    "all-to-all": all_to_all,
    "steps": steps,
    "experts": experts,
}


def main() -> None:
    for name, table in TABLES.items():
        put_into(PAGE, table(), (f"<!-- {name} -->", f"<!-- end of {name} -->"))


if __name__ == "__main__":
    main()
