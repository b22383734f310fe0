"""Uncompressed collectives of tensors in host memory that are not large, made for latency.

What ranks compare of a call travels in the same messages as the values. So a call that ranks make differently is an
error on all of them, at no cost: a collective of gloo's would end the process or mix up the values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from .base import SmallCollectives, peer_errors
from .comparison import RankComparison
from .connections import Connections

# Up to here each rank sends all of a tensor to all others at once. Larger ones are summed in two rounds, in which each
# rank sends fewer bytes.
_ONE_ROUND_BYTES = 16 << 10
# That a rank sends in one round. Gloo takes longer for less than that, even without a comparison before it; from there
# on the time of one hardly counts.
_MOST_BYTES = 16 << 20
_MOST_BROADCAST_BYTES = 256 << 10  # which gloo passes on from rank to rank: its sender sends less
_OPERATORS: dict[dist.ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class MeshSmallCollectives(SmallCollectives):
    """Collectives in which every rank sends its values to every other one.

    Sums are formed in rank order and therefore bit-identical on all ranks, those of float16 and bfloat16 in float32.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self._rank = connections.rank
        self._world_size = connections.world_size

    def serve(self, collective: str, input: Tensor, op: dist.ReduceOp | None) -> bool:
        n = self._world_size
        share = n if collective == "reduce_scatter_tensor" or self._in_two_rounds(collective, input) else 1
        nbytes = -(-input.nbytes // share)
        most = _MOST_BROADCAST_BYTES if collective == "broadcast" and n > 2 else _MOST_BYTES
        return (
            self._connections.mesh is not None
            and nbytes <= self._connections.opening_bytes
            and nbytes * (n - 1) <= most
            and (op is None or op in _OPERATORS)
        )

    def run(
        self,
        collective: str,
        input: Tensor,
        output: Tensor,
        op: dist.ReduceOp | None,
        root: int,
        comparison: RankComparison,
        check: Callable[[], None],
    ) -> None:
        with peer_errors(f"the plain {collective}"):
            # Without autograd, which refuses to write to a parameter; gloo's collectives ignore it as well.
            flat = input.detach().view(-1), output.detach().view(-1)
            self._run(collective, *flat, op, root, comparison, check)

    def _run(self, collective, input, output, op, root, comparison, check):
        n, rank = self._world_size, self._rank
        if collective == "broadcast":
            outgoing = [input if rank == root else input[:0]] * n
            sizes = [input.numel() if peer == root else 0 for peer in range(n)]
        elif collective == "reduce_scatter_tensor" or self._in_two_rounds(collective, input):
            outgoing = input.tensor_split(n)
            sizes = [outgoing[rank].numel()] * n
        else:
            outgoing, sizes = [input] * n, [input.numel()] * n
        received = self._connections.open(comparison.tensor, outgoing)
        check()
        values = [
            outgoing[rank]
            if peer == rank
            else message.view(input.dtype).view(sizes[peer])  # an error unless it has that size
            for peer, message in enumerate(received)
        ]
        if collective == "broadcast":
            if rank != root:
                output.copy_(values[root])
        elif collective == "all_gather_into_tensor":
            for part, value in zip(output.tensor_split(n), values):
                part.copy_(value)  # each by itself, as this rank's may be there already
        elif collective == "reduce_scatter_tensor" or not self._in_two_rounds(collective, input):
            output.copy_(self._reduced(values, op))
        else:
            parts = output.tensor_split(n)
            parts[rank].copy_(self._reduced(values, op))
            received = self._connections.exchange([parts[rank]] * n, [part.nbytes for part in parts])
            for peer, part in enumerate(parts):
                if peer != rank:
                    part.copy_(received[peer].view(part.dtype).view(part.numel()))

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _ONE_ROUND_BYTES

    def _reduced(self, values: list[Tensor], op: dist.ReduceOp) -> Tensor:
        dtype = values[0].dtype
        if dtype in (torch.float16, torch.bfloat16):
            values = [each.float() for each in values]
        total = reduce(_OPERATORS[op], values)
        return (total / self._world_size if op == dist.ReduceOp.AVG else total).to(dtype)
