"""Uncompressed collectives between some ranks of a group, made of messages over the group's own connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.futures import Future, collect_all

from .base import PlainCollectives, Work


class SubsetCollectives(PlainCollectives):
    """Collectives between some ranks. All ranks of each subset make the same calls.

    torch.distributed.new_group can't take their place: it knows no ranks that met through a store, such as torchft's,
    and every NCCL group takes GPU memory.

    Args:
        plain: collectives of the whole group. Only `exchange` is used.
        ranks: the ranks of the subset, by their numbers in the group.
        rank: the index of this rank in `ranks`.
    """

    def __init__(self, plain: PlainCollectives, ranks: Sequence[int], rank: int):
        self._plain = plain
        self._ranks = ranks
        self._rank = rank

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        """See `PlainCollectives.all_reduce`. `op` must be MAX. Each rank finds the maximum of one part."""
        if op != dist.ReduceOp.MAX:
            raise self._missing(f"all_reduce with {op}")
        n = len(self._ranks)
        padded = F.pad(tensor, (0, -tensor.numel() % n))
        received = torch.empty_like(padded)
        self.all_to_all_single(received, padded).wait()
        self.all_gather_single(padded, received.view(n, -1).amax(0)).wait()
        return _Messages([], lambda: tensor.copy_(padded[: tensor.numel()]))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Work:
        outgoing = input.split(list(sent)) if sent else input.chunk(len(self._ranks))
        incoming = output.split(list(received)) if received else output.chunk(len(self._ranks))
        return self._exchange(outgoing, incoming)

    def all_gather_single(self, output: Tensor, input: Tensor) -> Work:
        return self._exchange([input] * len(self._ranks), output.chunk(len(self._ranks)))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        if self._rank == root:
            others = [rank for number, rank in enumerate(self._ranks) if number != root]
            return _Messages(self._plain.exchange([(rank, tensor) for rank in others], []))
        return _Messages(self._plain.exchange([], [(self._ranks[root], tensor)]))

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send tensor i of `outgoing` to rank i, and receive tensor i of `incoming` from rank i."""
        peers = [number for number in range(len(self._ranks)) if number != self._rank]
        works = self._plain.exchange(
            [(self._ranks[peer], outgoing[peer]) for peer in peers if outgoing[peer].numel()],
            [(self._ranks[peer], incoming[peer]) for peer in peers if incoming[peer].numel()],
        )
        incoming[self._rank].copy_(outgoing[self._rank])
        return _Messages(works)


class _Messages:
    """Work of messages under way, with a function to call when all of them are complete."""

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

    def get_future(self) -> Future[None]:
        """The same as a future. Only torch's messages over NCCL have one."""
        return collect_all([work.get_future() for work in self._works]).then(self._finish)

    def _finish(self, done: Future[list[Future]]) -> None:
        for message in done.value():
            message.value()  # raises what the message has failed with
        self.wait()
