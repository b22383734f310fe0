"""When tensors on GPUs may be read: once the stream that computes them has come so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .pending import PendingTensor


class Streams:
    """A stream for each GPU, on which the thread of one process set works beside the program's own."""

    def __init__(self):
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after(self, tensors: list[PendingTensor]) -> Iterator[None]:
        """A context in which `tensors` may be read and written. What is done to them is done when it ends.

        In host memory they may be at any time.
        """
        devices = {pending.tensor.device for pending in tensors if pending.tensor.is_cuda}
        for device in devices - self._streams.keys():
            self._streams[device] = torch.cuda.Stream(device)
        with ExitStack() as current:
            for device in devices:
                current.enter_context(torch.cuda.device(device))
                current.enter_context(torch.cuda.stream(self._streams[device]))
            for pending in tensors:
                if pending.ready is not None:
                    self._streams[pending.tensor.device].wait_event(pending.ready)
            yield
            for device in devices:
                self._streams[device].synchronize()
