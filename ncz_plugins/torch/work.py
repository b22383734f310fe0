"""Works of torch.distributed that stand for handles of ours, where torch takes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from ..core.runtime.handle import Handle, _on_unused_stream, fail
from .private import not_compiled


@not_compiled
class HandleWork(dist.Work):
    """Work that stands for a handle. torch's C++, which functional collectives go through, takes works only.

    Args:
        handle: a handle of a compressed call.
        unawaited: a set that holds the work until it was waited for or its future is done.
        around: makes the context in which callbacks of the future run, on whatever thread. The future then raises
            RuntimeError with the text of the call's error. None: there is no context, and the error is the call's.
    """

    def __init__(
        self,
        handle: Handle,
        unawaited: set[HandleWork] | None = None,
        around: Callable[[], AbstractContextManager] | None = None,
    ):
        super().__init__()
        self._handle = handle
        self._around = around
        self._unawaited = set() if unawaited is None else unawaited
        if unawaited is not None:
            unawaited.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        is_over = False
        try:
            is_over = self._handle.wait(timeout or None)  # torch passes 0 for no time-out
        finally:
            if is_over or self._handle.is_completed():
                self._unawaited.discard(self)
        return True

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def is_success(self) -> bool:
        return self._handle.is_success()

    def exception(self) -> BaseException | None:
        return self._handle.exception()

    def result(self) -> list[Tensor]:
        self._handle.wait()
        return list(self._handle.outputs)

    def get_future(self) -> Future[list[Tensor]]:
        future = self._handle.get_future()
        future.add_done_callback(lambda _: self._unawaited.discard(self))
        if self._around is None:
            return future
        # The error of a callback is one for torch's C++ too. DDP's reducer takes others for results, and crashes.
        return _passed_on(future, self._handle, self._around).then(lambda done: done.value())


def _passed_on(future: Future, handle: Handle, around: Callable[[], AbstractContextManager]) -> Future:
    """A future with the same result, whose callbacks run in a context."""
    passed_on = handle._new_future()

    def complete(done: Future) -> None:
        with around(), _on_unused_stream(handle.outputs):  # `value` makes the current CUDA stream wait
            try:
                passed_on.set_result(done.value())
            except Exception as error:
                fail(passed_on, error.with_traceback(None))  # its traceback holds the future

    future.add_done_callback(complete)
    return passed_on


@not_compiled
class WorkOfSeveral(dist.Work):
    """Work that stands for several works."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[list[Tensor]]:
        """A future that gives the results of all works, one after another."""
        everything = collect_all([work.get_future() for work in self._works])
        return everything.then(lambda done: [tensor for each in done.value() for tensor in each.value()])
