"""Compressed all-reduces of single tensors, with Horovod's signatures, for those without a DistributedOptimizer.

As in torch.distributed, and unlike in Horovod, all ranks must make the same calls before they wait for the first of
them: what is pending then is reduced together.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.runtime.inference_mode import outside_of_inference_mode
from .compressor import NCZ, as_instance
from .pending import Pending
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
    """As hvd.allreduce_async: a handle for `hvd.synchronize`; `tensor` is not changed."""
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
    """As hvd.allreduce: the average (or sum) over ranks; `tensor` is not changed. Gradients flow through it."""
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
    """As hvd.grouped_allreduce_async."""
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
    """As hvd.grouped_allreduce. Gradients flow through it."""
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
    """What the gradient of a named result is called."""
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
    with outside_of_inference_mode():  # of which the thread that reduces knows nothing
        outputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    compressor = as_instance(compression)
    if compressor is None:
        raise UnsupportedError(f"compression={compression!r} is not NCZ; hvd.allreduce takes it")
    if name is None or not grouped:
        names = [name] * len(tensors)
    else:
        names = [f"{name}.{index}" for index in range(len(tensors))]
    how = op, prescale_factor, postscale_factor, process_set
    return submit(Pending(compressor, compressor, outputs, names, *how, grouped=grouped))
