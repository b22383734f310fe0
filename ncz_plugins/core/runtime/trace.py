"""Where time goes in a collective: counted, shown in Nsight Systems, and recorded (see docs/guides/profiling.md).

    with recording() as events:
        communicator.all_reduce(tensor)
    json.dump(events, file)  # for chrome://tracing or ui.perfetto.dev

A row for each thread that codes shows what it did; a row for each peer and direction shows the frames under way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from .statistics import Counters

_HAS_NVTX = torch.version.cuda is not None  # builds of torch for CPUs lack it
_recorder: _Recorder | None = None


@contextmanager
def span(what: str, nbytes: int, counters: Counters | None = None):
    """Show the time inside as an NVTX range "ncz WHAT NBYTES", and add it to `counters`' WHAT_seconds if given."""
    if _HAS_NVTX:
        torch.cuda.nvtx.range_push(f"ncz {what} {nbytes}")
    started = time.perf_counter()
    try:
        yield
    finally:
        ended = time.perf_counter()
        if counters is not None:
            total = f"{what}_seconds"
            setattr(counters, total, getattr(counters, total) + ended - started)
        if _recorder is not None:
            _recorder.add(threading.current_thread().name, what, started, ended, nbytes)
        if _HAS_NVTX:
            torch.cuda.nvtx.range_pop()


def transfer(work, row: str, what: str, nbytes: Callable[[], int]):
    """A frame under way: `work`, or while recording one that can be waited for like it, whose time is recorded.

    Args:
        work: a send or a receive that has just been started, which nobody else waits for.
        row: frames of the same row end in the order in which they started.
        nbytes: tells the size once the frame is there.
    """
    return work if _recorder is None else _recorder.watch(work, row, what, nbytes)


@contextmanager
def recording():
    """Yields a list that gets Chrome trace events of this process for all that happens inside.

    Times are microseconds of `time.perf_counter`, rows are threads with a name. A frame's span in "sending to" begins
    when it is handed over and ends when the last of it has left this process. That in "receiving from" ends when all
    of it is there; it begins when the frame before it was, or when it was first waited for, as nobody sees the first
    byte come. Recording costs a thread for each peer and direction; one recording at a time.
    """
    global _recorder
    _recorder = _Recorder()
    try:
        yield _recorder.events
    finally:
        recorder, _recorder = _recorder, None
        recorder.close()


class _Recorder:
    """Turns spans into events.

    Attributes:
        events: dicts as the Trace Event Format has them.
    """

    def __init__(self):
        self.events: list[dict] = []
        self._rows: dict[str, int] = {}
        self._watchers: dict[str, _Watcher] = {}
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

    def watch(self, work, row: str, what: str, nbytes: Callable[[], int]) -> _Watched:
        """See `transfer`."""
        with self._lock:
            if row not in self._watchers:
                self._watchers[row] = _Watcher(self, row)
        return self._watchers[row].watch(work, what, nbytes)

    def close(self) -> None:
        """End the threads, each of which is done as soon as the last of its frames is."""
        for watcher in self._watchers.values():
            watcher.jobs.put(None)


class _Watched:
    """Stands in for a work that a watcher waits for."""

    def __init__(self, done: Future):
        self._done = done

    def wait(self) -> None:
        self._done.result()


class _Watcher:
    """A thread that sees when each frame of a row ends. It waits no longer than the works themselves do."""

    def __init__(self, recorder: _Recorder, row: str):
        self._recorder = recorder
        self._row = row
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"ncz-watcher {row}", daemon=True).start()

    def watch(self, work, what: str, nbytes: Callable[[], int]) -> _Watched:
        done: Future = Future()
        self.jobs.put((work, what, nbytes, time.perf_counter(), done))
        return _Watched(done)

    def _run(self) -> None:
        before = 0.0
        while (job := self.jobs.get()) is not None:
            work, what, nbytes, started, done = job
            try:
                work.wait()
                ended = time.perf_counter()
                # Frames of a row travel one behind the other, however early they were asked for.
                self._recorder.add(self._row, what, max(started, before), ended, nbytes())
            except BaseException as error:
                done.set_exception(error)
                continue
            before = ended
            done.set_result(None)
