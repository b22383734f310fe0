"""How fast the CPU kernels are on one core, against memcpy on the same core in the same run.

    python benchmarks/codec.py [--json benchmarks/results/codec-cpu.json]

A large float32 tensor is worked through frame by frame, as a collective would. GB/s always counts the float32
bytes that go in (or come out), also for memcpy. memcpy and all operations take turns within each repetition, so
that a machine that slows down slows all of them; figures are medians over the repetitions. Trust the ratios, more
than the absolute figures, and neither on a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import ncz_plugins
from ncz_plugins import kernels
from ncz_plugins.kernels.format import CHUNK, Coder, Predictor, chunks_of, max_frame_bytes

CODERS = {  # name in the table: what is asked for
    "fixed": (Coder.FIXED, Predictor.NONE),
    "fixed+delta": (Coder.FIXED, Predictor.DELTA),
    "raw": (Coder.RAW, Predictor.NONE),
    "auto": (Coder.AUTO, Predictor.AUTO),
}
OPERATIONS = ("encode", "decode", "reduce", "statistics")


def gradient(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian, with another scale in each block, as layers have; the step is half of a block's rms."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(2 * torch.randn(chunks_of(count), generator=generator)) * 1e-3
    x = torch.randn(count, generator=generator) * scales.repeat_interleave(CHUNK)[:count]
    return x, scales * 0.5


def smooth_field(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A slow wave with a faster ripple, as in a simulation; the step is 2e-3 of its largest magnitude."""
    t = torch.arange(count, dtype=torch.float64) / 1000
    x = (torch.sin(t) + 0.1 * torch.sin(17 * t)).to(torch.float32)
    return x, torch.full((chunks_of(count),), 2e-3)


DATA = {"gradient": gradient, "smooth field": smooth_field}


def measure(backend, x, steps, coders, frame_elements: int, repeats: int) -> list[dict]:
    """One row per coder: GB/s and the ratio to memcpy of each operation."""
    pieces = [slice(i, min(i + frame_elements, x.numel())) for i in range(0, x.numel(), frame_elements)]
    chunks = [slice(p.start // CHUNK, p.start // CHUNK + chunks_of(p.stop - p.start)) for p in pieces]
    inverse = 1 / steps
    out = torch.empty_like(x)
    room = torch.empty(len(pieces), max_frame_bytes(frame_elements), dtype=torch.uint8)
    room2 = torch.empty_like(room)

    def memcpy():
        for p in pieces:
            ctypes.memmove(out[p].data_ptr(), x[p].data_ptr(), 4 * (p.stop - p.start))

    def encode(coder, predictor):
        return [
            row[: backend.encode(x[p], inverse[c], coder, predictor, row)] for p, c, row in zip(pieces, chunks, room)
        ]

    def decode(frames):
        for frame, p, c in zip(frames, pieces, chunks):
            backend.decode(frame, steps[c], out[p])

    def reduce(frames, coder, predictor):
        for frame, p, c, row in zip(frames, pieces, chunks, room2):
            backend.reduce(frame, x[p], inverse[c], coder, predictor, row)

    def chunk_statistics():
        for p in pieces:
            backend.chunk_statistics(x[p])

    frames = {name: [f.clone() for f in encode(*coders[name])] for name in coders}
    runs = {("memcpy", ""): memcpy, ("statistics", ""): chunk_statistics}
    for name, asked in coders.items():
        runs["encode", name] = lambda asked=asked: encode(*asked)
        runs["decode", name] = lambda name=name: decode(frames[name])
        runs["reduce", name] = lambda name=name, asked=asked: reduce(frames[name], *asked)
    seconds = {run: [] for run in runs}
    for repeat in range(repeats + 1):
        for run, function in runs.items():
            start = time.perf_counter()
            function()
            if repeat:  # the first round warms up
                seconds[run].append(time.perf_counter() - start)
    gigabytes = {run: 4e-9 * x.numel() / statistics.median(s) for run, s in seconds.items()}
    rows = []
    for name in coders:
        row = {"coder": name, "ratio": 4 * x.numel() / sum(f.numel() for f in frames[name])}
        row["memcpy"] = gigabytes["memcpy", ""]
        for operation in OPERATIONS:
            speed = gigabytes[operation, "" if operation == "statistics" else name]
            row[operation] = {"gigabytes_per_second": speed, "of_memcpy": speed / row["memcpy"]}
        rows.append(row)
    return rows


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "ncz_plugins": ncz_plugins.__version__,
        "kernels": kernels.statuses(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="float32 input, 64 unless told")
    parser.add_argument("--frame-bytes", type=int, default=1 << 20, help="float32 bytes per frame, 1 MiB unless told")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backends", nargs="+", default=[n for n, s in kernels.statuses().items() if s == "ok"])
    parser.add_argument("--coders", nargs="+", choices=CODERS, default=list(CODERS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    coders = {name: CODERS[name] for name in options.coders}
    frame_elements = options.frame_bytes // 4 // CHUNK * CHUNK
    console, results = Console(width=None if sys.stdout.isatty() else 120), []
    for data, make in DATA.items():
        table = Table(title=f"{data}: GB/s of float32, one core (ratio to memcpy)")
        for column in ("kernels", "coder", "ratio", "memcpy", *OPERATIONS):
            table.add_column(column, justify="left" if column in ("kernels", "coder") else "right")
        for name in options.backends:
            slow = name == "reference"  # hundreds of times slower: one frame and one repetition say enough
            count = frame_elements if slow else options.megabytes * (1 << 20) // 4
            x, steps = make(count)
            for row in measure(kernels.load(name), x, steps, coders, frame_elements, 1 if slow else options.repeats):
                results.append({"data": data, "kernels": name, **row})
                cells = [f"{row[o]['gigabytes_per_second']:.2f} ({row[o]['of_memcpy']:.2f})" for o in OPERATIONS]
                table.add_row(name, row["coder"], f"{row['ratio']:.2f}", f"{row['memcpy']:.1f}", *cells)
        console.print(table)
    if options.json:
        command = shlex.join(["python", *sys.argv])
        sizes = {name: getattr(options, name) for name in ("megabytes", "frame_bytes", "repeats")}
        report = {"command": command, **sizes, "machine": machine(), "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
