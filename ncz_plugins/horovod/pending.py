"""Tensors that wait for their reduction, and the handle that a program holds for them."""

from __future__ import annotations

import itertools
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
        op: Horovod's number for the reduce op.
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
        name, index: name of its handle, and its number in that handle. The same on all ranks.
        tensor: any shape and strides, may be a view. The result is written to it.
        parameter: name for policies, and size.
        residual: name for error feedback, different for each optimizer, and size.
        ready: CUDA event after which the values may be read; None in host memory.
        reduced: whether it has been reduced.
        result: result that is still to be copied to `tensor`; None if there is none.
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


class ReductionHandle:
    """Handle of one or more tensors that wait for their reduction.

    Args:
        owner: compressor of the optimizer, or an NCZ. Tensors of one owner are reduced together.
        names: the name of each tensor, None for one without a name.
        op, prescale, postscale: see Signature.
        process_set: the ranks that reduce them.
        grouped: True if the result is a list, False for a single tensor.

    Raises UnsupportedError for tensors on a device that has no kernels, and for a process set that Horovod does not
    know.

    Attributes:
        done: whether the step that reduces these tensors has ended.
        polled: whether the program has called hvd.poll for this handle.
    """

    def __init__(
        self,
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
        self.owner = owner
        self.process_set = process_set
        label = owner.label
        # Single tensors of two process sets may have the same names.
        if owner is owner.compressor and process_set.process_set_id != 0:
            label += f"ranks {' '.join(map(str, process_set.ranks))}/"
        self.name = f"{UNNAMED}{next(_unnamed):09d}" if names[0] is None else names[0]
        self.tensors = [
            PendingTensor(
                Signature(op, prescale, postscale, str(tensor.dtype).removeprefix("torch."), tensor.device.type),
                self.name,
                index,
                tensor,
                ParameterSlice(name, tensor.numel(), shape=tuple(tensor.shape)),
                ParameterSlice(name and label + name, tensor.numel()),
                record_event(tensor.device),
            )
            for index, (tensor, name) in enumerate(zip(tensors, names))
        ]
        self.done = False
        self.polled = False
        self._grouped = grouped

    def result(self) -> Tensor | list[Tensor]:
        """The result, written to the tensors. Raises hvd.HorovodInternalError if they were not reduced."""
        if not self.done:
            raise hvd.HorovodInternalError(
                f"{self.name} was not reduced: an earlier reduction failed, or Horovod was initialized again"
            )
        results = [pending.take_result() for pending in self.tensors]
        return results if self._grouped else results[0]
