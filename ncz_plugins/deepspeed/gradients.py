"""Replacements that compress the reduction of gradients, and nothing else.

DeepSpeed runs the same collectives on the same groups for gradients, weights, norms and flags. Only gradients may be
compressed. So `mark_gradients` wraps the methods that reduce gradients, and records while they run which gradients
these are. The wrapped collectives compress if there is a record, and call the original otherwise.

A few methods send gradients in ways that can't be compressed. `mark_plain` wraps these, and the collectives then count
what they send, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.reasons import Bypass
from ..core.training.policy import ParameterSlice
from .compression import GradientCompression
from .engine import ATTRIBUTE
from .parameter_slices import rank_major


class _Reduction(NamedTuple):
    """Record of the gradient reduction that is running now.

    Attributes:
        parts: parameter slices that the reduced gradients consist of, in order.
    """

    compression: GradientCompression
    parts: list[ParameterSlice]


class _Plain(NamedTuple):
    """Record of a method that is running now and sends gradients plain."""

    compression: GradientCompression
    reason: Bypass


_reducing: ContextVar[_Reduction | _Plain | None] = ContextVar("ncz_reducing_gradients", default=None)


def mark_gradients(list_gradients, original):
    """Wrapper of a method that reduces the gradients in its first argument.

    Args:
        list_gradients: a function of parameter_slices.py that takes the object of the method.
    """

    def reduce_gradients(self, given, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE, None)
        if compression is None:
            return original(self, given, *args, **kwargs)
        # ZeRO 3 sometimes passes parameters instead of their gradients.
        tensors = [each.grad if isinstance(each, torch.nn.Parameter) else each for each in _as_list(given)]
        with _reducing_gradients(_Reduction(compression, compression.parts(tensors, list_gradients(self)))):
            return original(self, given, *args, **kwargs)

    return reduce_gradients


def mark_plain(reason: Bypass, original):
    """Wrapper of a method that sends gradients plain. A method within it that `mark_gradients` wraps compresses."""

    def send_plain(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE, None)
        with _reducing_gradients(None if compression is None else _Plain(compression, reason)):
            return original(self, *args, **kwargs)

    return send_plain


@contextmanager
def _reducing_gradients(reduction: _Reduction | _Plain | None) -> Iterator[None]:
    token = _reducing.set(reduction)
    try:
        yield
    finally:
        _reducing.reset(token)


def _as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def compressed_all_reduce(original):
    """Replacement of TorchBackend.all_reduce: compressed while gradients are reduced."""

    @torch.compiler.disable
    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        reduction = _reducing.get()
        if not isinstance(reduction, _Reduction):
            _count_if_plain("all_reduce", tensor, group)
            return original(self, tensor, op, group, async_op)
        communicator = reduction.compression.communicator(group)
        return communicator.all_reduce(tensor, self._reduce_op(op), async_op, role="gradient", parts=reduction.parts)

    return all_reduce


def compressed_reduce_scatter(original):
    """Replacement of TorchBackend.reduce_scatter_tensor: compressed while gradients are reduced."""

    @torch.compiler.disable
    def reduce_scatter_tensor(
        self, output_tensor, input_tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False
    ):
        reduction = _reducing.get()
        if not isinstance(reduction, _Reduction):
            return original(self, output_tensor, input_tensor, op, group, async_op)
        return reduction.compression.communicator(group).reduce_scatter_single(
            output_tensor, input_tensor, self._reduce_op(op), async_op, role="gradient", parts=reduction.parts
        )

    return reduce_scatter_tensor


def counted_broadcast(original):
    """Replacement of TorchBackend.broadcast."""

    @torch.compiler.disable
    def broadcast(self, tensor, src, group=None, async_op=False):
        _count_if_plain("broadcast", tensor, group)
        return original(self, tensor, src, group, async_op)

    return broadcast


def counted_all_gather(original):
    """Replacement of TorchBackend.all_gather."""

    @torch.compiler.disable
    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        _count_if_plain("all_gather_single", tensor, group)
        return original(self, tensor_list, tensor, group, async_op)

    return all_gather


def counted_all_gather_into_tensor(original):
    """Replacement of TorchBackend.all_gather_into_tensor."""

    @torch.compiler.disable
    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        _count_if_plain("all_gather_single", input_tensor, group)
        return original(self, output_tensor, input_tensor, group, async_op)

    return all_gather_into_tensor


def _count_if_plain(collective: str, tensor: Tensor, group) -> None:
    """Count a collective to which this rank contributes `tensor`, while a method runs that `mark_plain` wraps."""
    plain = _reducing.get()
    if isinstance(plain, _Plain):
        plain.compression.count_plain(collective, tensor.nbytes, group, plain.reason)


def group_by_settings(original):
    """Replacement of reduce_scatter_coalesced: one call for all gradients with the same settings, padded with zeros.

    DeepSpeed itself pads with uninitialised memory, whose values would spoil the scale of a block.
    """

    def reduce_scatter_coalesced(tensors, group=None):
        reduction = _reducing.get()
        if not isinstance(reduction, _Reduction):
            return original(tensors, group)
        compression, parts = reduction
        ranks, dtype = compression.communicator(group).ranks, tensors[0].dtype
        n, rank = len(ranks), torch.distributed.get_rank(group)
        partitions = [tensor.view(-1)[:0] for tensor in tensors]
        places = [at for at, tensor in enumerate(tensors) if tensor.numel()]  # empty tensors have no part
        for _, members in compression.training.grouped(parts, dtype, "gradient", ranks):
            padded = [_padded(tensors[places[i]], n) for i in members]
            with _reducing_gradients(_Reduction(compression, rank_major([parts[i] for i in members], n))):
                reduced = original(padded, group)
            for i, partition in zip(members, reduced):
                # Cut off the padding, which makes the last ranks' partitions shorter.
                left = max(0, tensors[places[i]].numel() - rank * partition.numel())
                partitions[places[i]] = partition[:left]
        return partitions

    return reduce_scatter_coalesced


def _padded(tensor: Tensor, ranks: int) -> Tensor:
    """`tensor` as 1-D, with zeros appended up to a multiple of the number of ranks."""
    missing = -tensor.numel() % ranks
    return F.pad(tensor.reshape(-1), (0, missing)) if missing else tensor
