"""Measures the CPU kernels on one core, and memcpy on the same core in the same run.

    python benchmarks/codec.py [--json benchmarks/results/codec-cpu.json]

A large float32 tensor is worked through frame by frame, as a collective would. GB/s always counts the float32
bytes that go in (or come out), also for memcpy. memcpy and all operations take turns within each repetition, so
that a machine that slows down slows all of them; figures are medians over the repetitions. Trust the ratios, more
than the absolute figures, and neither on a busy machine. Where there are two cores, everything is also done by two
threads, that share the frames.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import ncz_plugins
from ncz_plugins import kernels
from ncz_plugins.core.codec.from_config import noise_for
from ncz_plugins.core.config import Config
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.kernels.format import (
    CHUNK,
    SCALE_BLOCK,
    Coder,
    Coding,
    Noise,
    Predictor,
    blocks_of,
    chunks_of,
    max_frame_bytes,
)

CODERS = {  # name in the table: what is asked for
    "fixed": Coding(Coder.FIXED, Predictor.NONE),
    "fixed+delta": Coding(Coder.FIXED, Predictor.DELTA),
    "huffman": Coding(Coder.HUFFMAN, Predictor.NONE),
    "huffman+delta": Coding(Coder.HUFFMAN, Predictor.DELTA),
    "rans": Coding(Coder.RANS, Predictor.NONE),
    "raw": Coding(Coder.RAW, Predictor.NONE),
    "auto": Coding(),
}
OPERATIONS = ("encode", "decode", "reduce", "statistics")
THREADS = 2


class Data(NamedTuple):
    """What is quantized: float32 of [count], the steps of its blocks, and how it is rounded (None: to the nearest)."""

    x: torch.Tensor
    steps: torch.Tensor
    noise: Noise | None


def gradient(count: int) -> Data:
    """Gaussian, with another scale in each chunk, as layers have, quantized by the default."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(2 * torch.randn(chunks_of(count), generator=generator)) * 1e-3
    x = torch.randn(count, generator=generator) * scales.repeat_interleave(CHUNK)[:count]
    rms = scales.repeat_interleave(CHUNK // SCALE_BLOCK)[: blocks_of(count)]
    default = Config()
    return Data(x, rms * default.quantizer.value, noise_for(default, call=0, addend=0, addends=2))


def low_entropy(count: int) -> Data:
    """The gradient to the nearest, with a step of four times a block's rms: 19 of 20 codes are zero, of 0.3 bits."""
    x, steps, _ = gradient(count)
    return Data(x, steps * (4 / Config().quantizer.value), None)


def smooth_field(count: int) -> Data:
    """A slow wave with a faster ripple, as in a simulation; the step is 2e-3 of its largest magnitude."""
    t = torch.arange(count, dtype=torch.float64) / 1000
    x = (torch.sin(t) + 0.1 * torch.sin(17 * t)).to(torch.float32)
    return Data(x, torch.full((blocks_of(count),), 2e-3), None)


DATA = {"gradient": gradient, "low entropy": low_entropy, "smooth field": smooth_field}


def measure(
    backend, data: Data, coders, frame_elements: int, repeats: int, pool: ThreadPoolExecutor | None
) -> list[dict]:
    """One row per coder: GB/s, the ratio to memcpy, and what `pool` makes of it, of each operation."""
    x, steps, noise = data
    count = -(-x.numel() // frame_elements)
    pieces = [slice(i * frame_elements, min((i + 1) * frame_elements, x.numel())) for i in range(count)]
    steps_of = [slice(p.start // SCALE_BLOCK, -(-p.stop // SCALE_BLOCK)) for p in pieces]
    inverse = 1 / steps
    noises = [noise and noise.from_block(s.start) for s in steps_of]
    others = x.roll(1)  # what another rank might have
    out = torch.empty_like(x)
    buffer = torch.empty(count, max_frame_bytes(frame_elements), dtype=torch.uint8)
    room2 = torch.empty_like(buffer)
    frames = {
        name: [
            room[: backend.encode(x[piece], inverse[own], coding, room, noise)].clone()
            for piece, own, noise, room in zip(pieces, steps_of, noises, buffer)
        ]
        for name, coding in coders.items()
    }

    # Each works on frame number i.
    def memcpy(i):
        ctypes.memmove(out[pieces[i]].data_ptr(), x[pieces[i]].data_ptr(), 4 * (pieces[i].stop - pieces[i].start))

    def block_statistics(i):
        backend.block_statistics(x[pieces[i]])

    def encode(i, name):
        backend.encode(x[pieces[i]], inverse[steps_of[i]], coders[name], buffer[i], noises[i])

    def decode(i, name):
        backend.decode(frames[name][i], steps[steps_of[i]], out[pieces[i]])

    def reduce(i, name):
        own = others[pieces[i]], inverse[steps_of[i]]
        backend.reduce(frames[name][i], *own, coders[name], room2[i], noises[i])

    runs = {("memcpy", ""): memcpy, ("statistics", ""): block_statistics}
    for name, operation in itertools.product(coders, (encode, decode, reduce)):
        runs[operation.__name__, name] = functools.partial(operation, name=name)

    def go(run, first, step):
        for i in range(first, count, step):
            runs[run](i)

    seconds = {(run, threads): [] for run in runs for threads in ((1, THREADS) if pool else (1,))}
    for repeat in range(repeats + 1):
        for run, threads in seconds:
            start = time.perf_counter()
            if threads == 1:
                go(run, 0, 1)
            else:
                list(pool.map(lambda first, run=run: go(run, first, THREADS), range(THREADS)))
            if repeat:  # the first round warms up
                seconds[run, threads].append(time.perf_counter() - start)
    gigabytes = {key: 4e-9 * x.numel() / statistics.median(s) for key, s in seconds.items()}

    def speed(run):
        one = gigabytes[run, 1]
        return {
            "gigabytes_per_second": one,
            "of_memcpy": one / gigabytes[("memcpy", ""), 1],
            "two_threads": gigabytes[run, THREADS] / one if pool else None,
        }

    return [
        {
            "coder": name,
            "ratio": 4 * x.numel() / sum(f.numel() for f in frames[name]),
            "memcpy": speed(("memcpy", "")),
            **{o: speed((o, "" if o == "statistics" else name)) for o in OPERATIONS},
        }
        for name in coders
    ]


def two_threads() -> ThreadPoolExecutor | None:
    """Threads on a core each, where there are as many cores."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < THREADS:
        return None
    cores = iter(sorted(os.sched_getaffinity(0), reverse=True))
    pool = ThreadPoolExecutor(THREADS, initializer=lambda: os.sched_setaffinity(0, {next(cores)}))
    barrier = threading.Barrier(THREADS)
    list(pool.map(lambda _: barrier.wait(), range(THREADS)))  # so that both threads exist
    return pool


def table(title: str, rows: list[dict], cell: Callable[[dict], str]) -> Table:
    result = Table(title=title)
    for column in ("kernels", "coder", "ratio", "memcpy", *OPERATIONS):
        result.add_column(column, justify="left" if column in ("kernels", "coder") else "right")
    for row in rows:
        cells = [cell(row[column]) for column in ("memcpy", *OPERATIONS)]
        result.add_row(row["kernels"], row["coder"], f"{row['ratio']:.2f}", *cells)
    return result


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
    parser.add_argument("--megabytes", type=int, default=64, help="float32 input; default 64")
    parser.add_argument("--frame-bytes", type=int, default=1 << 20, help="float32 bytes per frame; default 1 MiB")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backends", nargs="+", default=[n for n, s in kernels.statuses().items() if s == "ok"])
    parser.add_argument("--coders", nargs="+", choices=CODERS, default=list(CODERS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    pool = two_threads()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    coders = {name: CODERS[name] for name in options.coders}
    frame_elements = options.frame_bytes // 4 // CHUNK * CHUNK
    console, results = Console(width=None if sys.stdout.isatty() else 120), []
    for data in options.data:
        rows = []
        for name in options.backends:
            slow = name == "reference"  # hundreds of times slower: one frame and one repetition say enough
            count = frame_elements if slow else options.megabytes * (1 << 20) // 4
            repeats = 1 if slow else options.repeats
            measured = measure(
                kernels.load(name), DATA[data](count), coders, frame_elements, repeats, None if slow else pool
            )
            rows += [{"data": data, "kernels": name, **row} for row in measured]
        title = f"{data}: GB/s of float32, one core (ratio to memcpy)"
        console.print(table(title, rows, lambda s: f"{s['gigabytes_per_second']:.2f} ({s['of_memcpy']:.2f})"))
        if parallel := [row for row in rows if row["memcpy"]["two_threads"]]:
            title = f"{data}: two threads on two cores to one"
            console.print(table(title, parallel, lambda s: f"{s['two_threads']:.2f}"))
        results += rows
    if options.json:
        command = shlex.join(["python", *sys.argv])
        sizes = {name: getattr(options, name) for name in ("megabytes", "frame_bytes", "repeats")}
        report = {"command": command, **sizes, "machine": machine(), "results": results}
        write_whole(options.json, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
