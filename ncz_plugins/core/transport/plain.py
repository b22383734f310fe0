"""The uncompressed collectives that a call falls back to.

They call the process group itself, not torch.distributed's functions, because those refuse a group
that torch did not register, such as the communicator's own.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, op, group):
    """Sum, or another op, over ranks in place. Returns the work under way."""
    options = dist.AllreduceOptions()
    options.reduceOp, divisor = _without_average(op, tensor, group)
    return _Division(group.allreduce([tensor], options), tensor, divisor)


def reduce_scatter_tensor(output: Tensor, input: Tensor, op, group):
    """Sum, or another op, over ranks; rank i gets the i-th part. Returns the work under way."""
    options = dist.ReduceScatterOptions()
    options.reduceOp, divisor = _without_average(op, input, group)
    return _Division(group._reduce_scatter_base(output, input, options), output, divisor)


def all_gather_into_tensor(output: Tensor, input: Tensor, group):
    """Every rank's input in rank order. Returns the work under way."""
    return group._allgather_base(output, input)


def broadcast(tensor: Tensor, root: int, group):
    """What rank `root` of the group holds. Returns the work under way."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options)


def _without_average(op, tensor: Tensor, group):
    """AVG of floats as SUM and a division: the backends for CPU tensors have no AVG."""
    if op == dist.ReduceOp.AVG and tensor.is_floating_point() and tensor.device.type == "cpu":
        return dist.ReduceOp.SUM, group.size()
    return op, 1


class _Division:
    """A sum under way that is divided once waited for."""

    def __init__(self, work: dist.Work, tensor: Tensor, divisor: int):
        self._work = work
        self._tensor = tensor
        self._divisor = divisor

    def wait(self, *timeout) -> bool:
        self._work.wait(*timeout)
        if self._divisor != 1:
            self._tensor.div_(self._divisor)
            self._divisor = 1
        return True

    def is_completed(self) -> bool:
        return self._divisor == 1 and self._work.is_completed()
