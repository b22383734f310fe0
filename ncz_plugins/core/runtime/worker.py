"""One background thread that runs collectives in the order they were asked for."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from ..errors import PeerError, UnsupportedError, forget_tensors, fresh
from .handle import Handle, fail, seconds_of
from .threads import start_thread


class FutureHandle(Handle):
    """The handle of a job that the background thread runs."""

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
                del error  # not to be in a frame that is in its copy's traceback
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def get_future(self) -> Future[list[Tensor]]:
        future, outputs = self._new_future(), list(self.outputs)
        where = outputs[0].device

        def complete(error: BaseException | None) -> None:  # on a GPU, too, the result is in place by now
            # A thread begins with GPU 0. A future goes from there to the GPU of its tensors and back, and to go back to
            # one that this process does not use makes a context there, of half a gigabyte.
            with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
                if error is not None:
                    fail(future, error)
                else:
                    future.set_result(outputs)

        # The job's future keeps `when_done` when it is over. So `when_done` must let go of `complete`, which has the
        # tensors, and not know this handle, which has the job's future.
        callbacks, asking, waiting = self._callbacks, threading.get_ident(), [complete]

        def when_done(done: concurrent.futures.Future) -> None:
            completing = partial(waiting.pop(), done.exception())
            if threading.get_ident() == asking:
                completing()  # it is over already: then its future is, too, as torchft expects
            else:
                callbacks.run(completing)

        self._future.add_done_callback(when_done)
        return future


class Callbacks:
    """Runs what others have asked to be told, on threads of their own.

    A callback may wait for further calls, or for another callback: it must hold up neither. So there are as many
    threads as callbacks that have not returned, and those that have nothing to do are used again.
    """

    def __init__(self, name: str):
        self._name = name
        self._idle: list[Worker] = []
        self._is_closed = False

    def run(self, callback: Callable[[], None]) -> None:
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
            except RuntimeError:  # an interpreter that ends starts no threads
                return callback()
        worker.submit(job)

    def close(self) -> None:
        """End the threads, those that run a callback after that."""
        self._is_closed = True
        with suppress(IndexError):  # none is left; a thread that becomes idle ends the rest as well
            while True:
                self._idle.pop().close(0)


class Worker:
    """A thread that runs jobs in order. It is a daemon: a hung peer must not keep the interpreter from ending.

    A fork of this process has no such thread; there, `require_own_process` and `submit` raise UnsupportedError.
    """

    def __init__(self, name: str):
        self._process = os.getpid()
        self._callbacks = Callbacks(f"{name}-callbacks")
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = start_thread(_run, self._jobs, name)

    def submit(self, job: Callable[[], None]) -> FutureHandle:
        """Run `job` after all earlier ones. Raises UnsupportedError in a fork."""
        self.require_own_process()
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._jobs.put((job, future))
        return FutureHandle(future, self._callbacks)

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
        self._callbacks.close()
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
            forget_tensors(error)  # all of its frames but this one have ended
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future  # do not hold tensors while idle
