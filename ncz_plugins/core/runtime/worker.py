"""One background thread that runs collectives in the order they were asked for."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable

import torch

from ..errors import PeerError, UnsupportedError
from .handle import Handle, seconds_of


class FutureHandle(Handle):
    """The handle of a job that the background thread runs."""

    def __init__(self, future: concurrent.futures.Future):
        self._future = future
        self._late: PeerError | None = None  # a stream was let go before the result was there

    def wait(self, timeout=None) -> bool:
        try:
            self._future.result(None if timeout is None else seconds_of(timeout))
        except concurrent.futures.TimeoutError as error:
            if self._future.done():
                raise
            raise PeerError(f"the collective did not end within {seconds_of(timeout)} s; it goes on") from error
        if self._late is not None:
            raise self._late
        return True

    def block_current_stream(self, timeout=None) -> None:
        # By torch's means for collectives that hosts carry: a kernel of one thread polls a word in host memory.
        # docs/guides/gpus.md says what that asks of a program.
        from torch._C._distributed_c10d import _create_work_from_future  # not there in a torch without distributed

        there = torch.futures.Future()
        try:
            _create_work_from_future(there).block_current_stream()
        except (AttributeError, RuntimeError) as error:
            raise UnsupportedError(
                f"torch {torch.__version__} can't hold up a CUDA stream here: {error}; call wait() instead"
            ) from error
        let_go = threading.Lock()

        def release(late: PeerError | None = None) -> None:
            if let_go.acquire(blocking=False):
                self._late = self._late or late
                there.set_result(None)

        if timeout is not None:
            late = PeerError(
                f"the collective held up a CUDA stream for {seconds_of(timeout):g} s. What stands behind it went on "
                "without its result. Its thread may have waited for the device, which waited for it: see "
                "docs/guides/gpus.md, and transport.wait: host"
            )
            timer = threading.Timer(seconds_of(timeout), release, [late])
            timer.daemon = True
            timer.start()
            self._future.add_done_callback(lambda _: timer.cancel())
        self._future.add_done_callback(lambda _: release())

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None and self._late is None

    def exception(self) -> BaseException | None:
        return (self._future.exception() or self._late) if self._future.done() else None


class Worker:
    """A thread that runs jobs in order. It is a daemon: a hung peer must not keep the interpreter from ending.

    A fork of this process has no such thread; there, `require_own_process` and `submit` raise UnsupportedError.
    """

    def __init__(self, name: str):
        self._process = os.getpid()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> FutureHandle:
        """Run `job` after all earlier ones. Raises UnsupportedError in a fork."""
        self.require_own_process()
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._jobs.put((job, future))
        return FutureHandle(future)

    def require_own_process(self) -> None:
        """Raise UnsupportedError in a fork of the process that this belongs to: there a job would never run."""
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"process {os.getpid()} is a fork of process {self._process}, which has the threads and connections of "
                "this communicator to itself. Start processes by spawn or forkserver; one that is to take part needs a "
                "process group and a communicator of its own"
            )

    def __del__(self):
        self._jobs.put(None)  # nobody can submit any more, so the thread may end

    def close(self, timeout: float) -> bool:
        """End the thread after the jobs submitted so far. Returns False if that takes longer than `timeout` seconds."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def _run(jobs: queue.SimpleQueue) -> None:
    # A function, not a method: the thread must not keep the communicator that owns it alive.
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future  # do not hold tensors while idle
