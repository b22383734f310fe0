"""Process group that FSDP all-reduces over where it averages replicas itself: over a 2-D mesh, and in `replicate`.

torch has hooks for the reduce-scatter of a module and for what follows its reductions, and none for this all-reduce. It
is called on a process group of the module, so that group is exchanged for one whose all-reduce is compressed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor


class ReplicaGroup:
    """A process group of replicas with another all-reduce. In all else it is the group that it stands for.

    Args:
        group: the group that FSDP made of its mesh.
        reduce: reduces a tensor in place. It gets the tensor and the reduce op.
    """

    def __init__(self, group: dist.ProcessGroup, reduce: Callable[[Tensor, dist.ReduceOp], None]):
        self.group = group
        self._reduce = reduce

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:
        """Reduce the only tensor of `tensors` in place. Returns when it is reduced, or queued on the current stream."""
        [tensor] = tensors
        self._reduce(tensor, opts.reduceOp.op)

    def __getattr__(self, name: str):
        return getattr(self.group, name)

    # torch looks groups up in tables, such as that of backends for the message of an error.
    def __hash__(self) -> int:
        return hash(self.group)

    def __eq__(self, other: object) -> bool:
        return self is other or self.group == other
