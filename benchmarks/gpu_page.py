"""The tables of docs/results/gpus.md, from what `make gpu` found on a card (benchmarks/results/gpu.json).

.venv/bin/python -m benchmarks.gpu_page
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import put_into
from benchmarks.performance import Record, read, rows_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "gpus.md"
CALLS = (  # ranks, dtype, the sizes in MiB that the page shows
    (2, "float32", (1, 16, 64, 256)),
    (4, "float32", (64, 256)),
    (2, "bfloat16", (64, 256)),
    (4, "bfloat16", (64, 256)),
)
CONTENDERS = {"default": "by default", "bits": "4 bits", "bits in a graph": "4 bits, CUDA graph"}
KINDS = {"plain": "plain", "default": "gradients by default", "bits": "gradients at 4 bits"}
CODERS = "fixed", "huffman", "nvCOMP ANS"
OPERATIONS = {"encode": "encode", "decode": "decode", "reduce": "decode, add, encode"}
DATA = "gradient", 64  # and MiB in a frame


def calls_of(report: Record) -> dict[tuple[int, str, int], dict[str, Record]]:
    """All-reduces by ranks, dtype and MiB, then by contender."""
    found: dict[tuple[int, str, int], dict[str, Record]] = {}
    for name, stage in report["stages"].items():
        for row in stage["figures"] if name.endswith("ranks") else ():
            found.setdefault((row["ranks"], row["dtype"], row["mib"]), {})[row["contender"]] = row
    return found


def milliseconds(record: Record) -> str:
    """Three digits."""
    value = 1e3 * record["seconds"]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def calls() -> str:
    """Milliseconds of whole calls, and how many times as fast as plain NCCL."""
    found, rows = calls_of(read("gpu")), []
    for ranks, dtype, sizes in CALLS:
        for mib in sizes:
            cell = found[ranks, dtype, mib]
            which = f"{ranks} ranks, {'' if dtype == 'float32' else dtype + ', '}" if mib == sizes[0] else ""
            others = [f"{milliseconds(cell[name])} ({cell[name]['speed_up']:.2f})" for name in CONTENDERS]
            rows.append([f"{which}{mib} MiB", milliseconds(cell["plain"]), *others])
    return rows_of(["", "plain NCCL", *CONTENDERS.values()], rows, numbers=True)


def steps() -> str:
    """Training steps under DeepSpeed."""
    rows = []
    for row in read("gpu")["stages"]["training steps"]["figures"]:
        compressed = [] if row["ratio"] is None else [f"{row['speed_up']:.2f}", f"{row['ratio']:.1f}"]
        loss = f"{row['validation_loss']:.3f}"
        rows.append([KINDS[row["kind"]], f"{milliseconds(row)} ms", *(compressed or ["", ""]), loss])
    return rows_of(["", "a step", "speed-up", "ratio", "validation loss"], rows, numbers=True)


def kernels() -> str:
    """GB/s of float32 of each coder, and the share of what a copy of the same bytes allows."""
    figures = read("gpu")["stages"]["kernels"]["figures"]
    whole = figures["operations"] if "operations" in figures else figures  # alone in files up to November 2026
    tables = {(each["data"], each["frame_mib"]): each["rows"] for each in whole}
    found = {(row["coder"], row["operation"]): row for row in tables[DATA]}
    rows = []
    for coder in CODERS:
        cells = [found.get((coder, operation)) for operation in OPERATIONS]
        speeds = [f"{each['gigabytes_per_second']:,.0f} ({each['of_floor']:.2f})" if each else "" for each in cells]
        rows.append([coder, f"{cells[0]['ratio']:.1f}", *speeds])
    return rows_of(["coder", "ratio", *OPERATIONS.values()], rows, numbers=True)


TABLES = {"calls": calls, "steps": steps, "kernels": kernels}


def main() -> None:
    for name, table in TABLES.items():
        put_into(PAGE, table(), (f"<!-- {name} -->", f"<!-- end of {name} -->"))


if __name__ == "__main__":
    main()
