"""Tensors that are reduced in one call: the same ones in the same order on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.training.state import Training
from .pending import PendingTensor

FUSION_BYTES = 64 << 20  # what is reduced in one call; enough to hide its latency, little enough to fit in memory


def fused(tensors: list[PendingTensor], training: Training, ranks: list[int]) -> Iterator[list[PendingTensor]]:
    """All `tensors`, up to FUSION_BYTES at a time of those that are of one kind, on one device and treated alike.

    Args:
        tensors: in their order.
        ranks: those that reduce them.
    """
    for _, group in itertools.groupby(tensors, key=lambda pending: (pending.kind, pending.tensor.device)):
        alike = list(group)
        parameters = [pending.parameter for pending in alike]
        for _, indices in training.grouped(parameters, alike[0].tensor.dtype, "gradient", ranks):
            yield from _cut([alike[at] for at in indices])


def flattened(tensors: list[PendingTensor]) -> Tensor:
    """The values of all tensors, one after another, as a new tensor, [elements]."""
    return torch.cat([pending.tensor.reshape(-1) for pending in tensors])


def copy_back(flat: Tensor, tensors: list[PendingTensor]) -> None:
    """Give values that `flattened` has put together to the tensors that they came from.

    In host memory the program's own thread copies them when it waits: until then it may change its tensors, on each
    rank at another moment, or have given up this reduction and compute into the same memory again.
    """
    for pending, values in zip(tensors, flat.split([pending.tensor.numel() for pending in tensors])):
        pending.result = values.view(pending.tensor.shape)
        if flat.is_cuda:
            pending.take_result()


def _cut(tensors: list[PendingTensor]) -> Iterator[list[PendingTensor]]:
    """Neighbours, up to FUSION_BYTES at a time, or one if that is larger."""
    together: list[PendingTensor] = []
    size = 0
    for pending in tensors:
        if together and size + pending.tensor.nbytes > FUSION_BYTES:
            yield together
            together, size = [], 0
        together.append(pending)
        size += pending.tensor.nbytes
    yield together
