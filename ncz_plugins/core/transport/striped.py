"""Large gathers over several process groups side by side.

What goes through sockets, NCCL sends with one thread for each group, which carried 15 to 25 Gbit/s where we measured.
So on faster Ethernet several groups carry more, as several TCP connections do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Work
from .plain import TorchCollectives

MOST_GROUPS = 4
STRIPED_BYTES = 1 << 20  # of a rank; of less, one group is as fast
_ALIGNMENT = 512  # of a stripe, as of tensors


class StripedCollectives(TorchCollectives):
    """Collectives of the first of some process groups; large gathers by all of them.

    Args:
        groups: gives the process groups, which connect the same ranks, each time some are needed.
    """

    def __init__(self, groups: Callable[[], list[dist.ProcessGroup]]):
        super().__init__(lambda: groups()[0])
        self._groups = groups

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> Work:
        groups = self._groups()
        if len(groups) == 1 or input.nbytes < STRIPED_BYTES:
            return super().all_gather_into_tensor(output, input)
        return _StripedGather(groups, output, input)


class _StripedGather:
    """Each group gathers a stripe of every rank's bytes, to memory of its own. Waiting puts them together."""

    def __init__(self, groups: list[dist.ProcessGroup], output: Tensor, input: Tensor):
        given = input.view(-1).view(torch.uint8)
        length = -(-given.numel() // (len(groups) * _ALIGNMENT)) * _ALIGNMENT
        stripes = given.split(length)
        places = output.view(-1).view(torch.uint8).view(-1, given.numel()).split(length, dim=1)
        self._under_way: list[tuple[Work, Tensor, Tensor]] = []
        for group, stripe, place in zip(groups, stripes, places):
            gathered = stripe.new_empty(group.size(), stripe.numel())
            self._under_way.append((group._allgather_base(gathered.view(-1), stripe), gathered, place))

    def wait(self, *timeout) -> bool:
        while self._under_way:  # may be waited for more than once
            work, gathered, place = self._under_way[0]
            work.wait(*timeout)
            place.copy_(gathered)
            del self._under_way[0]
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work, *_ in self._under_way)
