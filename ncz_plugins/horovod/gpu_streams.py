"""CUDA streams on which reductions run beside the program's own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .pending import PendingTensor


class GpuStreams:
    """CUDA stream for each GPU, for the thread of one process set."""

    def __init__(self):
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after(self, tensors: list[PendingTensor]) -> Iterator[None]:
        """Context in which `tensors` may be read and written. On leaving it, all work on its streams is done.

        On entering, the streams wait for the events of tensors on GPUs. Tensors in host memory need no waiting.
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
