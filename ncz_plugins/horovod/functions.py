"""Compressed all-reduces of single tensors, with Horovod's signatures, for programs without a DistributedOptimizer.

As in torch.distributed, and unlike in Horovod, all ranks must make the same calls before they wait for the first one:
all pending tensors are reduced together.

All functions raise UnsupportedError for sparse tensors and for a `compression` other than NCZ, and MismatchError if
ranks differ.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.runtime.inference_mode import outside_of_inference_mode
from .compressor import NCZ, as_instance
from .pending import ReductionHandle
from .reduction import submit


def allreduce_async(
    tensor: Tensor,
    average=None,
    name: str | None = None,
    op=None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set=hvd.global_process_set,
    compression=NCZ,
):
    """Start a compressed all-reduce, like hvd.allreduce_async.

    Returns: a handle for `hvd.synchronize`, which returns a new tensor of the same shape and dtype.
    """
    return _start([tensor], False, average, name, op, prescale_factor, postscale_factor, process_set, compression)


def allreduce(
    tensor: Tensor,
    average=None,
    name: str | None = None,
    compression=NCZ,
    op=None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set=hvd.global_process_set,
) -> Tensor:
    """Average or sum a tensor over ranks, like hvd.allreduce. Gradients flow through it.

    Returns: a new tensor of the same shape and dtype.
    """
    return _AllReduce.apply(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: list[Tensor],
    average=None,
    name: str | None = None,
    op=None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set=hvd.global_process_set,
    compression=NCZ,
):
    """Start a compressed all-reduce of several tensors, like hvd.grouped_allreduce_async.

    Returns: a handle for `hvd.synchronize`, which returns a list of new tensors.
    """
    return _start(list(tensors), True, average, name, op, prescale_factor, postscale_factor, process_set, compression)


def grouped_allreduce(
    tensors: list[Tensor],
    average=None,
    name: str | None = None,
    compression=NCZ,
    op=None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set=hvd.global_process_set,
) -> list[Tensor]:
    """Average or sum several tensors over ranks, like hvd.grouped_allreduce. Gradients flow through it.

    Returns: a list of new tensors.
    """
    settings = (average, compression, op, prescale_factor, postscale_factor, process_set)
    return list(_GroupedAllReduce.apply(name, settings, *tensors))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set):
        ctx.settings = (average, _of_gradient(name), compression, op, prescale_factor, postscale_factor, process_set)
        handle = allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set, compression)
        return hvd.synchronize(handle)

    @staticmethod
    def backward(ctx, gradient):
        return allreduce(gradient, *ctx.settings), *[None] * 7


class _GroupedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, settings, *tensors):
        average, compression, op, *factors_and_process_set = settings
        ctx.settings, ctx.name = settings, _of_gradient(name)
        handle = grouped_allreduce_async(tensors, average, name, op, *factors_and_process_set, compression)
        return tuple(hvd.synchronize(handle))

    @staticmethod
    def backward(ctx, *gradients):
        average, *others = ctx.settings
        return None, None, *grouped_allreduce(gradients, average, ctx.name, *others)


def _of_gradient(name: str | None) -> str | None:
    """Name for the gradient of a named result."""
    return name and f"{name}.gradient"


def _start(tensors, grouped, average, name, op, prescale_factor, postscale_factor, process_set, compression):
    op = hvd.mpi_ops.handle_average_backwards_compatibility(op, average)
    if not tensors:
        raise ValueError("grouped_allreduce: the list of tensors is empty; pass at least one")
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise UnsupportedError(
                f"{name or 'allreduce'}: a tensor of layout {tensor.layout} can't be compressed; pass tensor.to_dense()"
            )
    with outside_of_inference_mode():  # the thread that reduces is not in inference mode, and must write to the copies
        outputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    compressor = as_instance(compression)
    if compressor is None:
        raise UnsupportedError(
            f"compression={compression!r} must be NCZ or an NCZ(...); for other compressors call hvd.allreduce"
        )
    if name is None or not grouped:
        names = [name] * len(tensors)
    else:
        names = [f"{name}.{index}" for index in range(len(tensors))]
    how = op, prescale_factor, postscale_factor, process_set
    return submit(ReductionHandle(compressor, outputs, names, *how, grouped=grouped))
