"""Uncompressed collectives of tensors in host memory that are not large, made for latency.

What ranks compare of a call travels in the same messages as the values. So a call that ranks make differently is an
error on all of them, at no cost: a collective of gloo's would end the process or mix up the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from .base import SmallCollectives, peer_errors
from .comparison import RankComparison
from .connections import Connections, Opening, memory_of, require_placed

# Up to here each rank sends all of a tensor to all others at once. Larger ones are summed in two rounds, in which each
# rank sends fewer bytes.
_ONE_ROUND_BYTES = 16 << 10
# That a rank sends in one round. Gloo takes longer for less than that, even without a comparison before it; from there
# on the time of one hardly counts.
_MOST_BYTES = 16 << 20
_MOST_BROADCAST_BYTES = 256 << 10  # which gloo passes on from rank to rank: its sender sends less
# Of a sum, how much is combined at once, while the rest is on its way: what a link carries in about a millisecond. Each
# piece takes some of the cores' time, which counts for more than the link's time where that is fast.
_LEAST_PIECE_BYTES, _PIECE_BYTES, _FAST_GBPS = 128 << 10, 2 << 20, 4.0
_BLOCK_BYTES = 256 << 10  # of a piece, that stays in a core's cache while what all ranks sent is added to it
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
        link_gbps: float | None = None,
    ) -> None:
        with peer_errors(f"the plain {collective}"):
            flat = _flat(input)
            out = flat if output is input else _flat(output)
            self._run(collective, flat, out, op, root, comparison, check, _piece_bytes(link_gbps))

    def _run(self, collective, input, output, op, root, comparison, check, piece_bytes):
        n, rank = self._world_size, self._rank
        own, places = input, None
        in_two_rounds = self._in_two_rounds(collective, input)
        if collective == "broadcast":
            outgoing = [memory_of(input if rank == root else input[:0])] * n
            places = [memory_of(output) if peer == root else None for peer in range(n)]
        elif collective == "all_gather_into_tensor":
            parts = output.tensor_split(n)
            own = input.clone() if _is_elsewhere_in(input, output, parts[rank]) else input
            outgoing, places = [memory_of(own)] * n, list(map(memory_of, parts))
        elif collective == "reduce_scatter_tensor" or in_two_rounds:
            contributions = input.tensor_split(n)
            own, outgoing = contributions[rank], list(map(memory_of, contributions))
        else:
            outgoing = [memory_of(input)] * n
        opening = self._connections.open(comparison, outgoing, places)
        opening.compare()
        try:
            check()
        except BaseException:
            opening.wait()  # so that nothing is left of it in the connections
            raise
        if places is None:
            self._reduce(opening, own, op, output.tensor_split(n) if in_two_rounds else [output], piece_bytes)
            return
        require_placed(opening.wait().values())
        if collective == "all_gather_into_tensor":
            parts[rank].copy_(own)  # it may be there already

    def _reduce(
        self, opening: Opening, own: Tensor, op: dist.ReduceOp, parts: Sequence[Tensor], piece_bytes: int
    ) -> None:
        """Combine what ranks send, piece by piece, as it comes; each rank in a part of its own, or all in the only one.

        In the former case each piece is told to the other ranks while the next one is on its way.
        """
        count = parts[0].nbytes // piece_bytes  # the same on all ranks, which have parts of two sizes
        by_part = [_cut(part, count) for part in parts]
        gathers, stop = [], 0
        for at, (mine, output) in enumerate(zip(_cut(own, count), by_part[self._rank % len(parts)])):
            start, stop = stop, stop + mine.nbytes
            received = opening.reach(stop)
            values = [
                mine if rank == self._rank else torch.from_numpy(received[rank][start:stop]).view(own.dtype)
                for rank in range(self._world_size)
            ]
            blocks = mine.nbytes // _BLOCK_BYTES
            for out, *of_ranks in zip(*(_cut(each, blocks) for each in (output, *values))):
                self._combine(of_ranks, op, out)
            if len(parts) > 1:
                gathers.append(self._connections.start_gather([pieces[at] for pieces in by_part]))
        opening.wait()
        for gather in gathers:
            gather.wait()

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _ONE_ROUND_BYTES

    def _combine(self, values: Sequence[Tensor], op: dist.ReduceOp, output: Tensor) -> None:
        """Replace `output`, which may be this rank's value, by the result. The other ranks' values are overwritten."""
        combine, n = _OPERATORS[op], self._world_size
        if output.dtype in (torch.float16, torch.bfloat16):
            values = [each.float() for each in values]
            total = reduce(combine, values)
            output.copy_(total / n if op == dist.ReduceOp.AVG else total)
            return
        *before, last = values
        received = values[1 if self._rank == 0 else 0]
        total = reduce(lambda a, b: combine(a, b, out=received), before)
        combine(total, last, out=output)
        if op == dist.ReduceOp.AVG:
            output.copy_(output / n)


def _flat(tensor: Tensor) -> Tensor:
    """Its memory, without autograd, which refuses to write to a parameter; gloo's collectives ignore it as well."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def _cut(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """So many pieces of a tensor, one at least."""
    return [tensor] if count <= 1 else tensor.tensor_split(count)


def _piece_bytes(link_gbps: float | None) -> int:
    if link_gbps is None or link_gbps >= _FAST_GBPS:
        return _PIECE_BYTES
    return max(round(link_gbps * _LEAST_PIECE_BYTES), _LEAST_PIECE_BYTES)


def _is_elsewhere_in(tensor: Tensor, output: Tensor, place: Tensor) -> bool:
    """Whether a tensor lies in the memory of an output, but not in its place there, where nothing is overwritten."""
    is_inside = tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return is_inside and tensor.data_ptr() != place.data_ptr()
