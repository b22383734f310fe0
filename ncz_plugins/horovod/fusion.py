"""Fusion of tensors into one call: the same tensors in the same order on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.training.state import Training
from .pending import PendingTensor

FUSION_BYTES = 64 << 20  # most bytes in one call: enough to hide the latency, little enough to fit in memory


def fused(tensors: list[PendingTensor], training: Training, ranks: list[int]) -> Iterator[list[PendingTensor]]:
    """Groups of at most FUSION_BYTES that share a signature, a device and the settings. A larger tensor is a group.

    Args:
        tensors: pending tensors, sorted by `PendingTensor.order`.
        ranks: the ranks that reduce them.
    """
    for _, group in itertools.groupby(tensors, key=lambda pending: (pending.signature, pending.tensor.device)):
        alike = list(group)
        parameters = [pending.parameter for pending in alike]
        for _, indices in training.grouped(parameters, alike[0].tensor.dtype, "gradient", ranks):
            yield from _cut([alike[at] for at in indices])


def flattened(tensors: list[PendingTensor]) -> Tensor:
    """Values of all tensors in a row, as a new tensor, [elements]."""
    return torch.cat([pending.tensor.reshape(-1) for pending in tensors])


def copy_back(flat: Tensor, tensors: list[PendingTensor]) -> None:
    """Give each tensor its part of `flat`, which `flattened` made.

    In host memory the program's own thread copies when it waits. Until then the program may change its tensors at any
    time, or may have given up this reduction and compute into the same memory again.
    """
    for pending, values in zip(tensors, flat.split([pending.tensor.numel() for pending in tensors])):
        pending.result = values.view(pending.tensor.shape)
        if flat.is_cuda:
            pending.take_result()


def _cut(tensors: list[PendingTensor]) -> Iterator[list[PendingTensor]]:
    """Runs of neighbours of at most FUSION_BYTES. A larger tensor is a run of its own."""
    together: list[PendingTensor] = []
    size = 0
    for pending in tensors:
        if together and size + pending.tensor.nbytes > FUSION_BYTES:
            yield together
            together, size = [], 0
        together.append(pending)
        size += pending.tensor.nbytes
    yield together
