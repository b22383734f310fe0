"""Reductions of tensors that need not be contiguous, as torch's own backends allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.communicator import Communicator
from ..core.runtime.handle import Handle
from ..core.runtime.stream import StreamHandle


def all_reduce(communicator: Communicator, tensors: Sequence[Tensor], op, role: str = "gradient") -> Handle:
    """Reduce tensors over ranks, in place.

    Tensors that are not contiguous are copied, and the call then waits for the result.
    """
    contiguous = [tensor.contiguous() if tensor.layout is torch.strided else tensor for tensor in tensors]
    handle = communicator.all_reduce_coalesced(contiguous, op, async_op=True, role=role)
    return _copied_back(handle, tensors, contiguous).giving(*tensors)


def reduce(
    communicator: Communicator, tensors: Sequence[Tensor], op, role: str = "gradient", *, group_dst: int
) -> Handle:
    """Reduce one tensor over ranks, in place on one of them.

    A tensor that is not contiguous is copied, and the call then waits for the result.
    """
    [tensor] = tensors
    contiguous = tensor.contiguous()
    handle = communicator.reduce(contiguous, op=op, async_op=True, group_dst=group_dst, role=role)
    return _copied_back(handle, tensors, [contiguous]).giving(*tensors)


def reduce_scatter(communicator: Communicator, output: Tensor, input: Tensor, op, role: str = "gradient") -> Handle:
    """Reduce a tensor over ranks and scatter the result.

    Tensors that are not contiguous are copied; if `output` is not, the call waits for the result.
    """
    scattered, how = _like(output), {"async_op": True, "role": role}
    handle = communicator.reduce_scatter_single(scattered, input.contiguous(), op, **how)
    return _copied_back(handle, [output], [scattered]).giving(output)


def reduce_scatter_of_list(
    communicator: Communicator,
    outputs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
    op,
    role: str = "gradient",
) -> Handle:
    """Reduce a list with a tensor for each rank, and leave the rank's own in the one of `outputs`."""
    [output], [tensors] = outputs, inputs
    scattered, how = _like(output), {"async_op": True, "role": role}
    handle = communicator.reduce_scatter(scattered, [tensor.contiguous() for tensor in tensors], op, **how)
    return _copied_back(handle, [output], [scattered]).giving(output)


def _like(output: Tensor) -> Tensor:
    """A contiguous tensor for the result: `output` itself if it is one."""
    return output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)


def _copied_back(handle: Handle, tensors: Sequence[Tensor], contiguous: Sequence[Tensor]) -> Handle:
    """Wait and copy the results to tensors that are not contiguous; do nothing if all are.

    Returns: a handle that is done after the copies.
    """
    copied = [(tensor, result) for tensor, result in zip(tensors, contiguous) if tensor is not result]
    if not copied:
        return handle
    handle.wait()
    for tensor, result in copied:
        tensor.detach().copy_(result)
    return StreamHandle.of_current(tensors[0].device) if tensors[0].is_cuda else handle
