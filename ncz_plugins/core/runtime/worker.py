"""Background threads: one that runs collectives in order, and threads that run callbacks."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor
from torch.futures import Future

from ..errors import NczError, PeerError, UnsupportedError, forget_tensors, fresh
from .handle import Handle, fail, seconds_of
from .process import start_thread


class FutureHandle(Handle):
    """Handle of a job on the background thread.

    Args:
        future: ends with the job.
        callbacks: runs what completes the futures of `get_future`.
    """

    def __init__(self, future: concurrent.futures.Future, callbacks: Callbacks):
        self._future = future
        self._callbacks = callbacks

    def wait(self, timeout=None) -> bool:
        try:
            error = self._future.exception(None if timeout is None else seconds_of(timeout))
        except concurrent.futures.TimeoutError as late:
            raise PeerError(f"the collective did not end within {seconds_of(timeout)} s; it goes on") from late
        if error is not None:
            try:
                raise fresh(error)
            finally:
                del error  # the copy's traceback has this frame: a circle
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def get_future(self) -> Future[list[Tensor]]:
        future = self._new_future()
        self._future.add_done_callback(_Completion(future, list(self.outputs), self._callbacks))
        return future


class _Completion:
    """Callback of a job's future that completes a future of `get_future`.

    The job's future keeps this object after the job. So this object lets go of the tensors when it has completed the
    future, and does not refer to the handle, which holds the job's future.
    """

    def __init__(self, future: Future[list[Tensor]], outputs: list[Tensor], callbacks: Callbacks):
        self._given: tuple[Future[list[Tensor]], list[Tensor]] | None = (future, outputs)
        self._error: BaseException | None = None
        self._callbacks = callbacks
        self._asking = threading.get_ident()

    def __call__(self, done: concurrent.futures.Future) -> None:
        self._error = done.exception()
        if threading.get_ident() == self._asking:
            self._complete()  # the job is over already, so the future is completed here: torchft expects that
        else:
            self._callbacks.run(self._complete)

    def _complete(self) -> None:
        (future, outputs), error = self._given, self._error
        self._given = self._error = None
        gpus = [tensor.device for tensor in outputs[:1] if tensor.is_cuda]
        # On a GPU, too, the result is in place by now. A thread begins with GPU 0, and a future switches to the GPU of
        # its tensors and back. Switching back to a GPU that this process does not use would create a CUDA context
        # there, of half a gigabyte.
        with torch.cuda.device(gpus[0]) if gpus else nullcontext():
            if error is not None:
                fail(future, error)
            else:
                future.set_result(outputs)


class Callbacks:
    """Threads that run callbacks, one thread for each callback that has not returned. Idle threads are used again.

    A callback may wait for further calls or for another callback, so it must block neither of them.
    """

    def __init__(self, name: str):
        self._name = name
        self._idle: list[Worker] = []
        self._is_closed = False

    def run(self, callback: Callable[[], None]) -> None:
        """Run a callback on an idle thread, or on a new one."""

        def job() -> None:
            try:
                callback()
            finally:
                self._idle.append(worker)
                if self._is_closed:
                    self.close()

        try:
            worker = self._idle.pop()
        except IndexError:
            try:
                worker = Worker(self._name)
            except RuntimeError:  # the interpreter is ending, and starts no threads
                return callback()
        worker.submit(job)

    def close(self) -> None:
        """End all threads. A thread that runs a callback ends after the callback."""
        self._is_closed = True
        with suppress(IndexError):  # raised when none is left
            while True:
                self._idle.pop().close(0)


class Worker:
    """Thread that runs jobs in order. It is a daemon: a peer that hangs must not keep the interpreter from ending.

    A fork of this process does not have the thread: there, `require_own_process` and `submit` raise UnsupportedError.
    """

    def __init__(self, name: str):
        self._process = os.getpid()
        self._callbacks = Callbacks(f"{name}-callbacks")
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._is_closed = False
        self._ending = threading.Lock()  # held while a job is put, and while the end is: no job comes after that
        self._thread = start_thread(_run, self._jobs, name)

    def submit(self, job: Callable[[], None]) -> FutureHandle:
        """Run `job` after all earlier jobs. Raises UnsupportedError in a fork, and NczError after `close`."""
        self.require_own_process()
        future: concurrent.futures.Future = concurrent.futures.Future()
        # Another thread may close this one meanwhile. A job that lay behind the end would never be over.
        with self._ending:
            if self._is_closed:
                raise NczError("the thread that was to run this has ended")
            self._jobs.put((job, future))
        return FutureHandle(future, self._callbacks)

    def require_own_process(self) -> None:
        """Raise UnsupportedError in a fork of the process that made this thread, where a job would never run."""
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"process {os.getpid()} is a fork of process {self._process}, which alone has the threads and "
                "connections of this communicator. Start processes by spawn or forkserver; a process that takes part "
                "needs its own process group and communicator"
            )

    def __del__(self):
        self._jobs.put(None)  # so that the thread ends

    def close(self, timeout: float) -> bool:
        """End the thread after all submitted jobs. Returns False if it has not ended after `timeout` seconds."""
        with self._ending:
            self._is_closed = True
            self._jobs.put(None)
        self._callbacks.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def _run(jobs: queue.SimpleQueue) -> None:
    """Run (job, future) pairs until None comes. Not a method, as the thread must not keep its owner alive."""
    torch.set_flush_denormal(False)  # a thread begins with what is set on the one that makes it
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            job()
        except BaseException as error:
            forget_tensors(error)
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future  # do not hold tensors while idle
