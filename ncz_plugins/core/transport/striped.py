"""Large gathers and exchanges over several NCCL groups side by side.

Over sockets, NCCL sends with one thread for each group, which carried 15 to 25 Gbit/s in our measurements. So on faster
Ethernet several groups carry more, as several TCP connections do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .base import GeneratorWork, Work
from .plain import TorchCollectives

MOST_GROUPS = 4
STRIPED_BYTES = 1 << 20  # of each rank, from which on several groups are faster
_STRIPE_ALIGNMENT_BYTES = 512  # as of tensors on a GPU


class StripedCollectives(TorchCollectives):
    """Collectives of the first of several process groups; large gathers and exchanges go over all of them.

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
        rows = _as_bytes(output, groups[0].size()), _as_bytes(input, 1)
        return GeneratorWork(_in_stripes(groups, TorchCollectives.all_gather_single, *rows))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Work:
        groups = self._groups()
        if len(groups) == 1 or input.nbytes < STRIPED_BYTES or received or sent:  # stripes are of equal parts
            return super().all_to_all_single(output, input, received, sent)
        rows = _as_bytes(output, groups[0].size()), _as_bytes(input, groups[0].size())
        return GeneratorWork(_in_stripes(groups, TorchCollectives.all_to_all_single, *rows))


def _as_bytes(tensor: Tensor, rows: int) -> Tensor:
    """A contiguous tensor as so many equal rows of bytes."""
    return tensor.view(-1).view(torch.uint8).view(rows, -1)


def _in_stripes(
    groups: list[dist.ProcessGroup],
    collective: Callable[[TorchCollectives, Tensor, Tensor], Work],
    output: Tensor,
    input: Tensor,
) -> Iterator[None]:
    """A collective of rows of bytes, of which each group carries a stripe."""
    length = -(-input.shape[1] // (len(groups) * _STRIPE_ALIGNMENT_BYTES)) * _STRIPE_ALIGNMENT_BYTES
    under_way: list[tuple[Work, Tensor, Tensor]] = []
    for group, stripe, out in zip(groups, input.split(length, dim=1), output.split(length, dim=1)):
        sent, received = stripe.contiguous(), out.new_empty(out.shape)
        work = collective(TorchCollectives(lambda group=group: group), received.view(-1), sent.view(-1))
        under_way.append((work, sent, received))
    yield

    # Put the stripes together.
    for (work, _, received), out in zip(under_way, output.split(length, dim=1)):
        work.wait()
        out.copy_(received)
