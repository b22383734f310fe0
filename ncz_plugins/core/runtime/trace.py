"""Where a collective spends its time: counted, shown as ranges in Nsight Systems, and recorded.

See docs/guides/profiling.md.

    with recording() as events:
        communicator.all_reduce(tensor)
    json.dump(events, file)  # for chrome://tracing or ui.perfetto.dev

Each thread that codes has a row that shows what it did. Each peer and direction has one that shows its frames.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

from .statistics import Counters

_HAS_NVTX = torch.version.cuda is not None  # builds of torch for CPUs lack it
_recorder: _Recorder | None = None


class span:
    """Shows the block as an NVTX range "ncz WHAT NBYTES", and adds its seconds to WHAT_seconds of `counters`.

    A call passes through twenty of them, so this is no generator.
    """

    __slots__ = ("_counters", "_nbytes", "_started", "_what")

    def __init__(self, what: str, nbytes: int, counters: Counters | None = None):
        self._what = what
        self._nbytes = nbytes
        self._counters = counters

    def __enter__(self) -> None:
        if _HAS_NVTX:
            torch.cuda.nvtx.range_push(f"ncz {self._what} {self._nbytes}")
        self._started = time.perf_counter()

    def __exit__(self, *_) -> None:
        ended = time.perf_counter()
        if self._counters is not None:
            total = f"{self._what}_seconds"
            setattr(self._counters, total, getattr(self._counters, total) + ended - self._started)
        if _recorder is not None:
            _recorder.add(threading.current_thread().name, self._what, self._started, ended, self._nbytes)
        if _HAS_NVTX:
            torch.cuda.nvtx.range_pop()


def record(row: str, what: str, started: float, ended: float, nbytes: int) -> None:
    """Record a span that the caller has timed, in seconds of `time.perf_counter`, if a recording is on."""
    if _recorder is not None:
        _recorder.add(row, what, started, ended, nbytes)


@contextmanager
def recording():
    """Yield a list that receives the Chrome trace events of this process until the block ends.

    Times are microseconds of `time.perf_counter`; rows are named threads. In a row "sending to", a frame begins when it
    is handed to the transport and ends when all of it has left this process. In a row "receiving from", it ends when
    all of it is there. It begins when the frame before it ended or when its receive was posted, whichever is later,
    since nobody sees its first byte arrive.

    Where frames go through gloo, a frame ends when its rank has waited for it. Only one recording may be on at a time.
    """
    global _recorder
    _recorder = _Recorder()
    try:
        yield _recorder.events
    finally:
        _recorder = None


class _Recorder:
    """Turns spans into events.

    Attributes:
        events: dictionaries of the Trace Event Format.
    """

    def __init__(self):
        self.events: list[dict] = []
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, row: str, what: str, started: float, ended: float, nbytes: int) -> None:
        """One span, in seconds."""
        with self._lock:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                name = {"name": "thread_name", "ph": "M", "pid": 0, "tid": self._rows[row], "args": {"name": row}}
                self.events.append(name)
            times = {"ts": 1e6 * started, "dur": 1e6 * (ended - started)}
            where = {"pid": 0, "tid": self._rows[row]}
            self.events.append({"name": what, "ph": "X", **times, **where, "args": {"bytes": nbytes}})
