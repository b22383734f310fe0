"""How fast an array is coded, beside memcpy and other compressors: on one core, in turns, medians of CPU time."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...core.codec.layout import Window
from ...core.config import MiB
from ...kernels.addresses import host_address
from .round_trip import RoundTrip

SECONDS = 1.0
_BYTES = 64 * MiB  # of input that speed is measured on: more than caches hold
_SLOW_BYTES = MiB  # the same for the numpy kernels, which are hundreds of times slower


@dataclass(frozen=True)
class Speeds:
    """GB/s of the array's own bytes.

    Attributes:
        memcpy: copying the array.
        measuring: the pass before encoding, which finds the quantization steps.
        encode: floats to frames, with known quantization steps.
        decode: frames to floats.
    """

    memcpy: float
    measuring: float
    encode: float
    decode: float


def speeds(trip: RoundTrip, others: dict[str, Callable[[], Any]] | None = None) -> tuple[Speeds, dict[str, float]]:
    """How fast the frames of `trip` are made and read, and GB/s of `others`, which work on the whole array."""
    ours, nbytes = _runs(trip)
    seconds = interleaved(ours | (others or {}))
    own = Speeds(**{name: 1e-9 * nbytes / seconds[name] for name in ours})
    return own, {name: 1e-9 * trip.array.nbytes / seconds[name] for name in others or {}}


def _runs(trip: RoundTrip) -> tuple[dict[str, Callable[[], Any]], int]:
    """What is to be timed, and how many bytes of input that works on.

    Frames at even distances stand for the whole of a large array.
    """
    codec = trip.codec
    layout, source, itemsize = codec.layout, codec.source, trip.array.itemsize
    budget = _SLOW_BYTES if codec.backend.name == "reference" else _BYTES
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


def interleaved(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of CPU time of each of `runs`, on one core.

    They take turns, so that a machine that slows down slows all alike: once to warm up, and then 5 to 100 times, about
    SECONDS in all. The time in which other processes have the core does not count.
    """

    def one_round() -> dict[str, float]:
        taken = {}
        for name, run in runs.items():
            begun = time.process_time()
            run()
            taken[name] = max(1e-9, time.process_time() - begun)  # a coarse clock may not have moved
        return taken

    with _one_core():
        warm_up = sum(one_round().values())
        rounds = [one_round() for _ in range(min(100, max(5, int(SECONDS / warm_up))))]
    return {name: statistics.median(each[name] for each in rounds) for name in runs}


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread on one core, and torch to one thread."""
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
