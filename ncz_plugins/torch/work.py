"""Works of torch.distributed that stand for handles of ours, where torch takes nothing else."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.runtime.handle import Handle


class HandleWork(dist.Work):
    """Work that stands for a handle. torch's C++, which functional collectives go through, takes works only.

    Args:
        handle: a handle of a compressed call.
        unawaited: a set that holds the work until it was waited for or its future is done.
    """

    def __init__(self, handle: Handle, unawaited: set[HandleWork] | None = None):
        super().__init__()
        self._handle = handle
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
        return future
