"""Uncompressed collectives between some ranks of a group, made of messages: for them there is no group of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .base import PlainCollectives, Work


class SubsetCollectives(PlainCollectives):
    """Collectives of some ranks. All ranks of each subset make the same calls.

    Args:
        plain: those of the whole group, of which `exchange` is used.
        ranks: those that take part, by their numbers in the group; `rank` is this one's number among them.
    """

    def __init__(self, plain: PlainCollectives, ranks: Sequence[int], rank: int):
        self._plain = plain
        self._ranks = ranks
        self._rank = rank

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        """See `PlainCollectives.all_reduce`; of the ops only MAX. Every rank finds the maximum of a part of it."""
        if op != dist.ReduceOp.MAX:
            raise self._missing(f"all_reduce with {op}")
        n = len(self._ranks)
        padded = F.pad(tensor, (0, -tensor.numel() % n))
        received = torch.empty_like(padded)
        self.all_to_all_single(received, padded).wait()
        self.all_gather_into_tensor(padded, received.view(n, -1).amax(0)).wait()
        return _Started([], lambda: tensor.copy_(padded[: tensor.numel()]))

    def all_to_all_single(self, output: Tensor, input: Tensor) -> Work:
        outgoing, incoming = input.chunk(len(self._ranks)), output.chunk(len(self._ranks))
        return self._exchanged(outgoing, incoming)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> Work:
        return self._exchanged([input] * len(self._ranks), output.chunk(len(self._ranks)))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        if self._rank == root:
            others = [rank for number, rank in enumerate(self._ranks) if number != root]
            return _Started(self._plain.exchange([(rank, tensor) for rank in others], []))
        return _Started(self._plain.exchange([], [(self._ranks[root], tensor)]))

    def _exchanged(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send a tensor to each rank and receive one from each."""
        peers = [number for number in range(len(self._ranks)) if number != self._rank]
        works = self._plain.exchange(
            [(self._ranks[peer], outgoing[peer]) for peer in peers],
            [(self._ranks[peer], incoming[peer]) for peer in peers],
        )
        incoming[self._rank].copy_(outgoing[self._rank])
        return _Started(works)


class _Started:
    """Messages under way, and what is to be done once they have come."""

    def __init__(self, works: Sequence[Work], then: Callable[[], object] | None = None):
        self._works = works
        self._then = then

    def wait(self, *timeout) -> bool:
        for work in self._works:
            work.wait(*timeout)
        if self._then is not None:
            self._then()
            self._then = None
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
