"""Tensors that wait for their reduction, and the handle that a program holds meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor

from ..core.bypass import Bypass, by_dtype, by_op
from ..core.errors import UnsupportedError
from ..core.runtime.device import record_event, require_kernels
from ..core.training.policy import ParameterSlice
from .compressor import NCZ, OptimizerCompressor

TORCH_OPS = {hvd.Average: dist.ReduceOp.AVG, hvd.Sum: dist.ReduceOp.SUM}  # those that can be compressed
UNNAMED = "ncz.noname."  # and a number, which may differ between ranks
_unnamed = itertools.count()


class Kind(NamedTuple):
    """What tensors must have in common to be reduced together, besides their treatment.

    Attributes:
        op: Horovod's.
        prescale, postscale: what the ranks' values and the result are multiplied by, on top of what `op` says.
        dtype: its name in torch.
        device: "cpu" or "cuda".
    """

    op: int
    prescale: float
    postscale: float
    dtype: str
    device: str

    @property
    def scale(self) -> float:
        """What the result is multiplied by."""
        return self.prescale * self.postscale

    @property
    def bypass(self) -> Bypass | None:
        """Why Horovod's own all-reduce must take such tensors; None if they can be compressed."""
        if self.op not in TORCH_OPS:
            return Bypass.OP
        return by_op(TORCH_OPS[self.op], self.scale) or by_dtype(getattr(torch, self.dtype))


@dataclass(eq=False)
class PendingTensor:
    """A tensor that is to be reduced.

    Attributes:
        name, index: what sorts it alike on all ranks: how it was submitted, and its number within a group.
        tensor: of any shape and strides. The result comes into its memory, which may be part of a larger tensor.
        parameter: by which policies know it.
        residual: by which error feedback knows it, apart from the parameters of other optimizers.
        ready: on a GPU, when its values are there.
        reduced: whether that has been done.
        result: what is still to be copied to `tensor`, if anything is.
    """

    kind: Kind
    name: str
    index: int
    tensor: Tensor
    parameter: ParameterSlice
    residual: ParameterSlice
    ready: torch.cuda.Event | None = None
    reduced: bool = False
    result: Tensor | None = None

    def take_result(self) -> Tensor:
        """`tensor`, with the result in it."""
        if self.result is not None:
            self.tensor.copy_(self.result)
            self.result = None
        return self.tensor

    @property
    def order(self) -> tuple:
        return (*self.kind, self.name, self.index)

    @property
    def key(self) -> tuple:
        """What it has in common with its like of another training step."""
        return (*self.order, self.tensor.numel())


class Pending:
    """The handle of tensors that wait for their reduction.

    Args:
        compressor: whose settings they are reduced with.
        owner: what has the same owner is reduced together.
        names: of each tensor, None for those that have none.
        op, prescale, postscale: see Kind.
        process_set: the ranks that reduce them.
        grouped: whether the result is a list.

    Raises UnsupportedError for tensors on devices that have no kernels, and for a process set that Horovod does not
    know.
    """

    def __init__(
        self,
        compressor: NCZ,
        owner: NCZ | OptimizerCompressor,
        tensors: list[Tensor],
        names: list[str | None],
        op: int,
        prescale: float,
        postscale: float,
        process_set: hvd.ProcessSet,
        *,
        grouped: bool,
    ):
        if process_set.process_set_id is None:
            raise UnsupportedError(
                f"{names[0] or 'allreduce'}: the process set of ranks {process_set.ranks} was never added or was "
                "removed; pass it to hvd.init(process_sets=...) or hvd.add_process_set"
            )
        for tensor, name in zip(tensors, names):
            try:
                require_kernels(tensor.device)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name or 'allreduce'}: {error}") from error
        self.compressor = compressor
        self.owner = owner
        self.process_set = process_set
        label = owner.label
        if owner is compressor and process_set.process_set_id != 0:  # whose single tensors may have the same names
            label += f"ranks {' '.join(map(str, process_set.ranks))}/"
        self.name = f"{UNNAMED}{next(_unnamed):09d}" if names[0] is None else names[0]
        self.tensors = [
            PendingTensor(
                Kind(op, prescale, postscale, str(tensor.dtype).removeprefix("torch."), tensor.device.type),
                self.name,
                index,
                tensor,
                ParameterSlice(name, tensor.numel()),
                ParameterSlice(name and label + name, tensor.numel()),
                record_event(tensor.device),
            )
            for index, (tensor, name) in enumerate(zip(tensors, names))
        ]
        self.done = False
        self.polled = False  # whether the program has asked if it is done
        self._grouped = grouped

    def result(self, reduce_all: Callable[[NCZ, NCZ | OptimizerCompressor], None]) -> Tensor | list[Tensor]:
        """Reduce everything that its owner has pending, this one included, and return the result(s)."""
        if not self.done:
            reduce_all(self.compressor, self.owner)
        if not self.done:  # it was dropped: an earlier reduction failed, or Horovod was initialized again
            raise hvd.HorovodInternalError(f"the reduction of {self.name} was given up; nothing was reduced")
        results = [pending.take_result() for pending in self.tensors]
        return results if self._grouped else results[0]
