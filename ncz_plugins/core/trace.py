"""Where the time of a collective goes: counted, and shown as ranges in Nsight Systems (see docs/profiling.md)."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from .stats import Counters

_HAS_NVTX = torch.version.cuda is not None  # builds of torch for CPUs lack it


@contextmanager
def span(what: str, nbytes: int, counters: Counters | None = None):
    """Show the time inside as an NVTX range "ncz WHAT NBYTES", and add it to `counters`' WHAT_seconds if given."""
    if _HAS_NVTX:
        torch.cuda.nvtx.range_push(f"ncz {what} {nbytes}")
    started = time.perf_counter()
    try:
        yield
    finally:
        if counters is not None:
            total = f"{what}_seconds"
            setattr(counters, total, getattr(counters, total) + time.perf_counter() - started)
        if _HAS_NVTX:
            torch.cuda.nvtx.range_pop()
