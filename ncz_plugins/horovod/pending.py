"""Tensors that wait for their reduction, and the handle that a program holds meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import horovod.torch as hvd
from torch import Tensor

from ..core.training.policy import ParameterSlice
from .compressor import NCZ, OptimizerCompressor

UNNAMED = "ncz.noname."  # and a number, which may differ between ranks
_unnamed = itertools.count()


class Kind(NamedTuple):
    """What tensors must have in common to be reduced together, besides their treatment.

    Attributes:
        op: Horovod's.
        scale: what the result is multiplied by, on top of what `op` says.
        dtype: its name.
    """

    op: int
    scale: float
    dtype: str


@dataclass(eq=False)
class PendingTensor:
    """A tensor that is to be reduced, in place.

    Attributes:
        name, index: what sorts it alike on all ranks: how it was submitted, and its number within a group.
        tensor: of any shape and strides.
        parameter: by which policies know it.
        residual: by which error feedback knows it, apart from the parameters of other optimizers.
        reduced: whether that has been done.
    """

    kind: Kind
    name: str
    index: int
    tensor: Tensor
    parameter: ParameterSlice
    residual: ParameterSlice
    reduced: bool = False

    @property
    def order(self) -> tuple:
        return (*self.kind, self.name, self.index)

    @property
    def key(self) -> tuple:
        """What it has in common with its like of another training step."""
        return (*self.order, self.tensor.numel())


class Pending:
    """The handle of tensors that wait for their reduction, in place.

    Args:
        compressor: whose settings they are reduced with.
        owner: what has the same owner is reduced together.
        names: of each tensor, None for those that have none.
        op, scale: see Kind.
        grouped: whether the result is a list.
        process_set: the ranks that reduce them.
    """

    def __init__(
        self,
        compressor: NCZ,
        owner: NCZ | OptimizerCompressor,
        tensors: list[Tensor],
        names: list[str | None],
        op: int,
        scale: float,
        process_set: hvd.ProcessSet,
        grouped: bool,
    ):
        self.compressor = compressor
        self.owner = owner
        self.process_set = process_set
        self.name = f"{UNNAMED}{next(_unnamed):09d}" if names[0] is None else names[0]
        self.tensors = [
            PendingTensor(
                Kind(op, scale, str(tensor.dtype)),
                self.name,
                index,
                tensor,
                ParameterSlice(name, tensor.numel()),
                ParameterSlice(name and owner.label + name, tensor.numel()),
            )
            for index, (tensor, name) in enumerate(zip(tensors, names))
        ]
        self.done = False
        self._grouped = grouped

    def result(self, reduce_all: Callable[[NCZ, NCZ | OptimizerCompressor], None]) -> Tensor | list[Tensor]:
        """Reduce everything that its owner has pending, this one included, and return the result(s)."""
        if not self.done:
            reduce_all(self.compressor, self.owner)
        if not self.done:  # it was dropped: an earlier reduction failed, or Horovod was initialized again
            raise hvd.HorovodInternalError(f"the reduction of {self.name} was given up; nothing was reduced")
        results = [pending.tensor for pending in self.tensors]
        return results if self._grouped else results[0]
