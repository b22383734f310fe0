"""Equal gradients for parameters that the ranks of tensor parallelism have in common.

The gradients of a module are rounded together. Ranks of a tensor-parallel group hold other parts of most parameters, so
they would round the gradient of a norm or a bias, which all of them hold whole, in different ways, and these weights
would drift apart. So they take the gradient that the first rank of their group got.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.call import plain_wire_bytes
from ..core.runtime.statistics import Counters
from .private import ReducedParameter


class TensorParallel:
    """The groups of ranks that split parameters of a model among them, and not for FSDP.

    Args:
        parameters: the sharded parameters of the model.
        data_groups: the process groups of FSDP.
    """

    def __init__(self, parameters: Iterable[DTensor], data_groups: Iterable[dist.ProcessGroup]):
        self._data_groups = {group.group_name for group in data_groups}
        self._groups: dict[str, dist.ProcessGroup] = {}
        for parameter in parameters:
            self._groups |= {group.group_name: group for group, _ in self._dimensions(parameter)}

    @property
    def is_used(self) -> bool:
        """Whether the model has such groups."""
        return bool(self._groups)

    def equalize(self, gradient: Tensor, parts: Sequence[ReducedParameter]) -> Counters:
        """Give all ranks that hold the same shard of a parameter the same gradient of it.

        Args:
            gradient: this rank's share of a module's gradients, flat.
            parts: the parameters that it consists of, in order.

        Returns: what this rank has sent for it.
        """
        # Sort the slices of the gradient by the groups whose ranks must agree on them.
        by_group: dict[str, list[Tensor]] = {}
        slices = gradient.split([part.elements for part in parts])
        for part, own in zip(parts, slices):
            for name in self._holding_the_same(part.parameter):
                by_group.setdefault(name, []).append(own)

        # One broadcast for each group, in the same order on all of its ranks.
        sent = 0
        for name in self._groups:
            if not (own := by_group.get(name)):
                continue
            group, together = self._groups[name], torch.cat(own)
            dist.broadcast(together, group=group, group_src=0)
            for each, agreed in zip(own, together.split([each.numel() for each in own])):
                each.copy_(agreed)
            sent += plain_wire_bytes("broadcast", together.nbytes, group.size())
        return Counters(wire_bytes=sent, wire_bytes_by_role={"gradient": sent} if sent else {})

    def _dimensions(self, parameter: DTensor) -> Iterator[tuple[dist.ProcessGroup, object]]:
        """The groups of a parameter's mesh that FSDP does not reduce over, and how the parameter lies in each."""
        mesh = parameter.device_mesh
        for at, placement in enumerate(parameter.placements):
            if (group := mesh.get_group(at)).group_name not in self._data_groups:
                yield group, placement

    def _holding_the_same(self, parameter: DTensor) -> list[str]:
        """Names of the groups whose ranks all hold the same shard of a parameter."""
        placements = {group.group_name: placement for group, placement in self._dimensions(parameter)}
        own_ranks = set(parameter.device_mesh.mesh.flatten().tolist())
        names = []
        for name, group in self._groups.items():
            if name in placements:
                holds_the_same = placements[name].is_replicate()
            else:
                # A parameter that was not made a DTensor. The ranks of its mesh hold its other shards.
                holds_the_same = len(own_ranks.intersection(dist.get_process_group_ranks(group))) == 1
            names += [name] if holds_the_same else []
        return names
