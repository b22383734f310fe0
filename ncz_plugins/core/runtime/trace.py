"""Spans of time in a collective: counted, shown as ranges in Nsight Systems, and recorded as Chrome traces.

See docs/guides/profiling.md.

    with recording() as events:
        communicator.all_reduce(tensor)
    json.dump(events, file)  # for chrome://tracing or ui.perfetto.dev

A recording has a row for each thread that codes, and a row of frames for each peer and direction.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

from .statistics import Counters

_recorder: _Recorder | None = None


class span:
    """Context that adds the time of its block to counter WHAT_seconds. Once CUDA is in use, it is also an NVTX range.

    The range is called "ncz WHAT NBYTES". A class and not a generator, as a call enters some twenty spans.

    Args:
        what: what the block does: one word.
        nbytes: bytes that the block works on.
        counters: receive the seconds; None: nobody.
    """

    __slots__ = ("_counters", "_is_range", "_nbytes", "_started", "_what")

    def __init__(self, what: str, nbytes: int, counters: Counters | None = None):
        self._what = what
        self._nbytes = nbytes
        self._counters = counters

    def __enter__(self) -> None:
        self._is_range = torch.cuda.is_initialized()
        if self._is_range:
            torch.cuda.nvtx.range_push(f"ncz {self._what} {self._nbytes}")
        self._started = time.perf_counter()

    def __exit__(self, *_) -> None:
        ended = time.perf_counter()
        if self._counters is not None:
            vars(self._counters)[f"{self._what}_seconds"] += ended - self._started
        if _recorder is not None:
            _recorder.add(threading.current_thread().name, self._what, self._started, ended, self._nbytes)
        if self._is_range:
            torch.cuda.nvtx.range_pop()


def record(row: str, what: str, started: float, ended: float, nbytes: int) -> None:
    """Add a span that the caller has timed to the recording, if one is on.

    Args:
        row: the row that shows the span.
        what, nbytes: see `span`.
        started, ended: in seconds of `time.perf_counter`.
    """
    if _recorder is not None:
        _recorder.add(row, what, started, ended, nbytes)


@contextmanager
def recording():
    """Record this process until the block ends. Yields a list that receives Chrome trace events.

    Times are microseconds of `time.perf_counter`, and rows are named threads. In a row "sending to", a frame begins
    when the transport gets it, and ends when all of it has left this process. In a row "receiving from", a frame ends
    when all of it is there. It begins when the frame before it ended or its receive was posted, whichever is later, as
    nobody sees its first byte arrive.

    If frames go through gloo, a frame ends when its rank has waited for it. Only one recording may be on at a time.
    """
    global _recorder
    _recorder = _Recorder()
    try:
        yield _recorder.events
    finally:
        _recorder = None


class _Recorder:
    """Collector of the events of a recording.

    Attributes:
        events: dictionaries in the Trace Event Format.
    """

    def __init__(self):
        self.events: list[dict] = []
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, row: str, what: str, started: float, ended: float, nbytes: int) -> None:
        """Add a span: see `record`."""
        with self._lock:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                name = {"name": "thread_name", "ph": "M", "pid": 0, "tid": self._rows[row], "args": {"name": row}}
                self.events.append(name)
            times = {"ts": 1e6 * started, "dur": 1e6 * (ended - started)}
            where = {"pid": 0, "tid": self._rows[row]}
            self.events.append({"name": what, "ph": "X", **times, **where, "args": {"bytes": nbytes}})
