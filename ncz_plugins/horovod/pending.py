"""Pending tensors, which wait for their reduction, and the handle that a program holds for them."""

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

TORCH_OPS = {hvd.Average: dist.ReduceOp.AVG, hvd.Sum: dist.ReduceOp.SUM}  # the ops that can be compressed
UNNAMED = "ncz.noname."  # prefix of a number, which may differ between ranks
_unnamed = itertools.count()


class Signature(NamedTuple):
    """Properties that tensors must share to be reduced in one call. Their settings must be the same, too.

    Attributes:
        op: Horovod's number of the op.
        prescale, postscale: factors of the ranks' values and of the result, in addition to what `op` does.
        dtype: its name in torch, such as "float32".
        device: "cpu" or "cuda".
    """

    op: int
    prescale: float
    postscale: float
    dtype: str
    device: str

    @property
    def scale(self) -> float:
        """Factor of the result."""
        return self.prescale * self.postscale

    @property
    def bypass(self) -> Bypass | None:
        """Reason why Horovod's own all-reduce must take such tensors; None if they can be compressed."""
        if self.op not in TORCH_OPS:
            return Bypass.OP
        return by_op(TORCH_OPS[self.op], self.scale) or by_dtype(getattr(torch, self.dtype))


@dataclass(eq=False)
class PendingTensor:
    """Tensor that is to be reduced.

    Attributes:
        name, index: sort key that is the same on all ranks: the name of its `Pending`, and its number in the group.
        tensor: any shape and strides. The result is written to it, and it may be a view.
        parameter: the name by which policies know it, and its size.
        residual: the name by which error feedback knows it, different for each optimizer.
        ready: on a GPU, an event after which its values may be read.
        reduced: whether it has been reduced.
        result: a result that is still to be copied to `tensor`; None if there is none.
    """

    signature: Signature
    name: str
    index: int
    tensor: Tensor
    parameter: ParameterSlice
    residual: ParameterSlice
    ready: torch.cuda.Event | None = None
    reduced: bool = False
    result: Tensor | None = None

    def take_result(self) -> Tensor:
        """Copy the result to `tensor`, unless that was done, and return `tensor`."""
        if self.result is not None:
            self.tensor.copy_(self.result)
            self.result = None
        return self.tensor

    @property
    def order(self) -> tuple:
        """Sort key that is the same on all ranks."""
        return (*self.signature, self.name, self.index)

    @property
    def key(self) -> tuple:
        """Key that the same tensor has in every training step."""
        return (*self.order, self.tensor.numel())


class Pending:
    """Handle of one or more tensors that wait for their reduction.

    Args:
        compressor: settings and state.
        owner: tensors of one owner are reduced together.
        names: the name of each tensor, None for one without a name.
        op, prescale, postscale: see Signature.
        process_set: the ranks that reduce them.
        grouped: True if the result is a list, False for a single tensor.

    Raises UnsupportedError for tensors on a device that has no kernels, and for a process set that Horovod does not
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
        # Single tensors of two process sets may have the same names.
        if owner is compressor and process_set.process_set_id != 0:
            label += f"ranks {' '.join(map(str, process_set.ranks))}/"
        self.name = f"{UNNAMED}{next(_unnamed):09d}" if names[0] is None else names[0]
        self.tensors = [
            PendingTensor(
                Signature(op, prescale, postscale, str(tensor.dtype).removeprefix("torch."), tensor.device.type),
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
        self.polled = False  # whether the program has called hvd.poll for it
        self._grouped = grouped

    def result(self, reduce_all: Callable[[NCZ, NCZ | OptimizerCompressor], None]) -> Tensor | list[Tensor]:
        """Reduce everything that is pending for the same owner, and return the result of this handle.

        Raises hvd.HorovodInternalError if an earlier reduction failed or Horovod was initialized again meanwhile.
        """
        if not self.done:
            reduce_all(self.compressor, self.owner)
        if not self.done:  # an earlier reduction failed, or Horovod was initialized again
            raise hvd.HorovodInternalError(
                f"{self.name} was not reduced: an earlier reduction failed, or Horovod was initialized again"
            )
        results = [pending.take_result() for pending in self.tensors]
        return results if self._grouped else results[0]
