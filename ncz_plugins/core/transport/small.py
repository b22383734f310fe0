"""Uncompressed collectives of tensors in host memory that are not large, made for latency.

What ranks compare of a call travels in the same messages as the values. So a call that ranks make differently is an
error on all of them, at no cost: a collective of gloo's would end the process or mix up the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .base import SmallCollectives, SmallWork
from .comparison import RankComparison
from .connections import Connections, Opening, require_placed

# Up to here each rank sends all of a tensor to all others at once. Larger ones are summed in two rounds, in which each
# rank sends fewer bytes.
_ONE_ROUND_BYTES = 16 << 10
# That a rank sends in one round. Gloo takes longer for less than that, even without a comparison before it; from there
# on the time of one hardly counts. In each of two rounds less: gloo's ring, in which each rank receives from one other
# rank only, takes less of the cores' time.
_MOST_BYTES, _MOST_BYTES_OF_TWO_ROUNDS = 16 << 20, 4 << 20
_MOST_BROADCAST_BYTES = 256 << 10  # which gloo passes on from rank to rank: its sender sends less
# Of a sum, how much is combined at once, while the rest is on its way: what a link carries in half a millisecond. Each
# piece takes some of the cores' time, which counts for more than the link's time where that is fast.
_LEAST_PIECE_BYTES, _PIECE_BYTES, _FAST_GBPS = 64 << 10, 2 << 20, 4.0
_BLOCK_BYTES = 256 << 10  # of a piece, that stays in a core's cache while what all ranks sent is added to it
# Of numpy, since these begin in half the time of torch's, which tells in small calls.
_OPERATORS: dict[dist.ReduceOp, np.ufunc] = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.AVG: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
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
        n, in_two_rounds = self._world_size, self._in_two_rounds(collective, input)
        nbytes, most = input.nbytes, _MOST_BYTES
        if in_two_rounds or collective == "reduce_scatter_tensor":
            nbytes = -(-nbytes // n)
        if in_two_rounds:
            most = _MOST_BYTES_OF_TWO_ROUNDS
        elif collective == "broadcast" and n > 2:
            most = _MOST_BROADCAST_BYTES
        return (
            self._connections.mesh is not None
            and nbytes <= self._connections.opening_bytes
            and nbytes * (n - 1) <= most
            and (op is None or op in _OPERATORS)
        )

    def start(
        self,
        collective: str,
        input: Tensor,
        output: Tensor,
        op: dist.ReduceOp | None,
        root: int,
        comparison: RankComparison,
        link_gbps: float | None = None,
    ) -> SmallWork:
        n, rank = self._world_size, self._rank
        own = _values(input)
        out = own if output is input else _values(output)
        if collective == "broadcast":
            values = [_memory(own if rank == root else own[:0])] * n
            places = [_memory(out) if peer == root else None for peer in range(n)]
            return _Placed(self._connections.open(comparison, values, places), lambda: None)
        if collective == "all_gather_into_tensor":
            parts = np.split(out, n)
            own = own.copy() if _is_elsewhere_in(own, out, parts[rank]) else own
            opening = self._connections.open(comparison, [_memory(own)] * n, list(map(_memory, parts)))
            return _Placed(opening, partial(np.copyto, parts[rank], own))  # they may be there already
        combine = partial(_combine, dtype=input.dtype, op=op, rank=rank)
        if collective == "reduce_scatter_tensor":
            contributions, outputs = np.split(own, n), [out]
        elif self._in_two_rounds(collective, input):
            contributions, outputs = np.array_split(own, n), np.array_split(out, n)
        else:
            contributions, outputs = [own] * n, [out]
        opening = self._connections.open(comparison, list(map(_memory, contributions)))
        return _Sum(self._connections, opening, contributions[rank], outputs, combine, _piece_bytes(link_gbps))

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _ONE_ROUND_BYTES


class _Placed(SmallWork):
    """Values that are received where they belong.

    Args:
        place_own: puts this rank's own values where they belong.
    """

    def __init__(self, opening: Opening, place_own: Callable[[], object]):
        self._opening = opening
        self._place_own = place_own

    def finish(self, check: Callable[[], None]) -> None:
        _compare(self._opening, check)
        require_placed(self._opening.wait())
        self._place_own()


class _Sum(SmallWork):
    """What ranks send is combined, piece by piece, as it comes; each rank in a part of its own, or all in the only one.

    In the former case each piece is told to the other ranks while the next one is on its way.

    Args:
        own: what this rank contributes to its part.
        parts: of the result.
        combine: takes the values of all ranks, in order, and where the result goes, see `_combine`.
        piece_bytes: of a piece, about.
    """

    def __init__(
        self,
        connections: Connections,
        opening: Opening,
        own: np.ndarray,
        parts: Sequence[np.ndarray],
        combine: Callable[[Sequence[np.ndarray], np.ndarray], None],
        piece_bytes: int,
    ):
        self._connections = connections
        self._opening = opening
        self._combine = combine
        count = parts[0].nbytes // piece_bytes  # the same on all ranks, which have parts of two sizes
        self._own = _cut(own, count)
        self._parts = [_cut(part, count) for part in parts]

    def finish(self, check: Callable[[], None]) -> None:
        rank = self._connections.rank
        received = _compare(self._opening, check, self._own[0].nbytes)
        gathers, stop = [], 0
        for at, (mine, output) in enumerate(zip(self._own, self._parts[rank % len(self._parts)])):
            start, stop = stop, stop + mine.nbytes
            if at > 0:
                received = self._opening.reach(stop)
            values = [message[start:stop].view(mine.dtype) for message in received]
            values.insert(rank, mine)
            blocks = mine.nbytes // _BLOCK_BYTES
            for out, *of_ranks in zip(*[_cut(each, blocks) for each in (output, *values)]):
                self._combine(of_ranks, out)
            if len(self._parts) > 1:
                gathers.append(self._connections.start_gather([_memory(pieces[at]) for pieces in self._parts]))
        self._opening.wait()
        for gather in gathers:
            gather.wait()


def _compare(opening: Opening, check: Callable[[], None], nbytes: int = 0) -> list[np.ndarray]:
    """Compare calls. Returns what came from each other rank, once so many bytes of it are there.

    Raises what `check` raises.
    """
    received = opening.compare(nbytes)
    try:
        check()
    except BaseException:
        opening.wait()  # so that nothing is left of it in the connections
        raise
    return received


def _combine(
    values: Sequence[np.ndarray], output: np.ndarray, dtype: torch.dtype, op: dist.ReduceOp, rank: int
) -> None:
    """Replace `output`, which may be the values of `rank`, by the result. The other ranks' values are overwritten.

    Args:
        values: of each rank, see `_values`; `output` likewise.
        dtype: of the tensors.
    """
    combine, n, result = _OPERATORS[op], len(values), output
    if dtype in (torch.float16, torch.bfloat16):
        values = [torch.from_numpy(each).view(dtype).float().numpy() for each in values]
        result = values[0]
    *before, last = values
    received = values[1 if rank == 0 else 0]
    with np.errstate(over="ignore", invalid="ignore"):  # whoever scales the loss counts on gradients that overflow
        total = reduce(lambda a, b: combine(a, b, out=received), before)
        combine(total, last, out=result)
    if op == dist.ReduceOp.AVG:
        result /= n
    if result is not output:
        torch.from_numpy(output).view(dtype).copy_(torch.from_numpy(result))


def _values(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, flat; that of bfloat16, which numpy does not have, as int16.

    Without autograd, which refuses to write to a parameter; gloo's collectives ignore it as well.
    """
    flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _memory(values: np.ndarray) -> memoryview:
    return values.view(np.uint8).data


def _cut(values: np.ndarray, count: int) -> Sequence[np.ndarray]:
    """So many pieces, one at least."""
    return [values] if count <= 1 else np.array_split(values, count)


def _piece_bytes(link_gbps: float | None) -> int:
    if link_gbps is None or link_gbps >= _FAST_GBPS:
        return _PIECE_BYTES
    return max(round(link_gbps * _LEAST_PIECE_BYTES), _LEAST_PIECE_BYTES)


def _is_elsewhere_in(values: np.ndarray, output: np.ndarray, place: np.ndarray) -> bool:
    """Whether values lie in the memory of an output, but not in their place there, where nothing is overwritten."""
    return np.may_share_memory(values, output) and values.ctypes.data != place.ctypes.data
