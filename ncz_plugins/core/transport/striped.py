"""Large gathers over several NCCL groups side by side.

Over sockets, NCCL sends with one thread for each group, which carried 15 to 25 Gbit/s in our measurements. So on faster
Ethernet several groups carry more, as several TCP connections do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .base import GeneratorWork, Work
from .plain import TorchCollectives

MOST_GROUPS = 4
STRIPED_BYTES = 1 << 20  # of each rank, from which on several groups are faster
_STRIPE_ALIGNMENT_BYTES = 512  # as of tensors on a GPU


class StripedCollectives(TorchCollectives):
    """Collectives of the first of several process groups, and large gathers over all of them.

    Args:
        groups: returns the process groups, which connect the same ranks. Called each time.
    """

    def __init__(self, groups: Callable[[], list[dist.ProcessGroup]]):
        super().__init__(lambda: groups()[0])
        self._groups = groups

    def all_gather_single(self, output: Tensor, input: Tensor) -> Work:
        groups = self._groups()
        if len(groups) == 1 or input.nbytes < STRIPED_BYTES:
            return super().all_gather_single(output, input)
        return GeneratorWork(_gather_in_stripes(groups, output, input))


def _gather_in_stripes(groups: list[dist.ProcessGroup], output: Tensor, input: Tensor) -> Iterator[None]:
    # Each group gathers a stripe of every rank's bytes.
    own = input.view(-1).view(torch.uint8)
    length = -(-own.numel() // (len(groups) * _STRIPE_ALIGNMENT_BYTES)) * _STRIPE_ALIGNMENT_BYTES
    outputs = output.view(-1).view(torch.uint8).view(-1, own.numel()).split(length, dim=1)
    under_way: list[tuple[Work, Tensor, Tensor]] = []
    for group, stripe, out in zip(groups, own.split(length), outputs):
        gathered = stripe.new_empty(group.size(), stripe.numel())
        under_way.append((group._allgather_base(gathered.view(-1), stripe), gathered, out))
    yield

    # Put the stripes together.
    for work, gathered, out in under_way:
        work.wait()
        out.copy_(gathered)
