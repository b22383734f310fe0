"""What stands for a handle of ours where torch wants a work of its own."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.runtime.handle import Handle


class HandleWork(dist.Work):
    """A handle as a work: torch's C++, which functional collectives go through, takes nothing else.

    Args:
        unawaited: where the work is kept until somebody has waited for it, or its future is done.
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
            is_over = self._handle.wait(timeout or None)  # torch's own calls pass 0 for none
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
