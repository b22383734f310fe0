"""Speed of coding an array and of memcpy: medians of CPU time on one core, in turns."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...core.codec.layout import Window
from ...core.config import MiB
from ...kernels.addresses import host_address
from .round_trip import RoundTrip

SECONDS = 1.0
_INPUT_BYTES = 64 * MiB  # more than fits into caches
_SLOW_INPUT_BYTES = MiB  # with the numpy kernels, which are hundreds of times slower


@dataclass(frozen=True)
class Speeds:
    """Speeds in GB/s of the array's bytes.

    Attributes:
        memcpy: copying the array.
        measuring: the pass before encoding that finds the quantization steps.
        encode: floats to frames, with known quantization steps.
        decode: frames to floats.
    """

    memcpy: float
    measuring: float
    encode: float
    decode: float

    @classmethod
    def of(cls, nbytes: int, seconds: dict[str, float]) -> Speeds:
        """Speeds of the functions of `runs`, which took these seconds on `nbytes` bytes of input."""
        return cls(**{field.name: 1e-9 * nbytes / seconds[field.name] for field in fields(cls)})


def speeds(trip: RoundTrip) -> Speeds:
    """Speeds of encoding and decoding `trip`."""
    ours, nbytes = runs(trip)
    return Speeds.of(nbytes, interleaved(ours))


def runs(trip: RoundTrip) -> tuple[dict[str, Callable[[], Any]], int]:
    """Functions to time, by name, and the bytes of input that they work on.

    Of a large array, only frames at equal distances are used.
    """
    codec = trip.codec
    layout, source, itemsize = codec.layout, codec.source, trip.array.itemsize
    budget = _SLOW_INPUT_BYTES if codec.backend.name == "reference" else _INPUT_BYTES
    count = min(layout.frames, max(1, budget // (layout.frame_elements * itemsize)))
    picked = [i * layout.frames // count for i in range(count)]
    outputs = [Window(torch.empty_like(source[e]), e.start) for e in (layout.frame(0, i) for i in picked)]
    nbytes = sum(output.data.nbytes for output in outputs)

    def memcpy():
        for i, output in zip(picked, outputs):
            into, own = output.data, source[layout.frame(0, i)]
            addresses = host_address(into, "output", own.dtype, own.numel()), host_address(own, "source", own.dtype)
            ctypes.memmove(*addresses, into.nbytes)

    def measuring():
        for i in picked:
            codec.backend.block_statistics(source[layout.frame(0, i)])

    def encode():
        for i in picked:
            codec.encode(0, i)

    def decode():
        for i, output in zip(picked, outputs):
            codec.tensor = codec.tensor._replace(output=output)
            codec.decode(0, i, trip.frames[i])

    return {"memcpy": memcpy, "measuring": measuring, "encode": encode, "decode": decode}, nbytes


def interleaved(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median CPU seconds of each of `functions`, on one core.

    They take turns, so that a machine that slows down slows all of them: one round to warm up, then 5 to 100
    rounds, which take about SECONDS in all. CPU time excludes time in which other processes have the core.
    """

    def one_round() -> dict[str, float]:
        taken = {}
        for name, run in functions.items():
            begun = time.process_time()
            run()
            taken[name] = max(1e-9, time.process_time() - begun)  # a coarse clock may not have moved
        return taken

    with _one_core():
        warm_up = sum(one_round().values())
        rounds = [one_round() for _ in range(min(100, max(5, int(SECONDS / warm_up))))]
    return {name: statistics.median(each[name] for each in rounds) for name in functions}


@contextmanager
def _one_core() -> Iterator[None]:
    """Context manager that keeps this thread on one core, and torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    try:
        if cores:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
