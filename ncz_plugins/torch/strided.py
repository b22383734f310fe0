"""All-reduces of tensors that need not be contiguous, as torch's own backends take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.communicator import Communicator
from ..core.runtime.handle import Handle
from ..core.runtime.stream import StreamHandle


def all_reduce(communicator: Communicator, tensors: Sequence[Tensor], op) -> Handle:
    """Reduce gradients over ranks, in place. Those that are not contiguous are copied there and back, at once."""
    contiguous = [tensor.contiguous() if tensor.layout is torch.strided else tensor for tensor in tensors]
    handle = communicator.all_reduce_coalesced(contiguous, op, async_op=True, role="gradient")
    copied = [(tensor, summed) for tensor, summed in zip(tensors, contiguous) if tensor is not summed]
    if copied:
        handle.wait()
        for tensor, summed in copied:
            tensor.detach().copy_(summed)
        if tensors[0].is_cuda:
            handle = StreamHandle.of_current(tensors[0].device)
    return handle.giving(*tensors)
