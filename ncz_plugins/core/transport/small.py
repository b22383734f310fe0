"""Uncompressed collectives of tensors in host memory that are not large, made for latency.

What ranks compare of a call travels in the same messages as the values. So a call that ranks make differently is an
error on all of them, at no cost: a collective of gloo's would end the process or mix up the values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from ... import kernels
from ...kernels.addresses import host_address
from ...kernels.format import COMBINED_DTYPES, Combination
from ...kernels.scratch import Scratch
from .base import SmallCollectives, SmallWork
from .comparison import RankComparison, place_of
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
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_COMBINATIONS = (Combination.ADD, Combination.ADD, Combination.MULTIPLY, Combination.LOWEST, Combination.HIGHEST)
# Such calls come seldom, in a training, and between them the caches are filled with other things. Then the first use of
# any function of torch or numpy takes 5 to 30 us, and what Python itself needs all the time next to nothing.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


class MeshSmallCollectives(SmallCollectives):
    """Collectives in which every rank sends its values to every other one.

    Sums are formed in rank order and therefore bit-identical on all ranks, those of float16 and bfloat16 in float32.
    Memory for what other ranks send is kept for the next sum: at most 16 MiB for each thread that makes calls.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self._rank = connections.rank
        self._world_size = connections.world_size
        self._backend = kernels.cpu_backend()
        self._scratch = Scratch()  # for what other ranks send

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
            and (op is None or (place_of(op, _OPS) < len(_OPS) and input.dtype in COMBINED_DTYPES))
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
        own = _flat(input)
        out = own if output is input else _flat(output)
        if collective == "broadcast":
            values = [_memory(own if rank == root else own[:0])] * n
            places = [_memory(out) if peer == root else None for peer in range(n)]
            return _Placed(self._connections.open(comparison, values).receive(places), lambda: None)
        if collective == "all_gather_into_tensor":
            parts = out.tensor_split(n)
            own = own.clone() if _is_elsewhere_in(own, out, parts[rank]) else own
            opening = self._connections.open(comparison, [_memory(own)] * n).receive(list(map(_memory, parts)))
            return _Placed(opening, partial(parts[rank].copy_, own))  # they may be there already
        if collective == "reduce_scatter_tensor":
            contributions, outputs = own.tensor_split(n), [out]
        elif self._in_two_rounds(collective, input):
            contributions, outputs = own.tensor_split(n), out.tensor_split(n)
        else:
            contributions, outputs = [own] * n, [out]
        opening = self._connections.open(comparison, list(map(_memory, contributions)))
        piece_bytes = _piece_bytes(link_gbps)
        if len(outputs) == 1 and any(_is_elsewhere_in(each, out) for each in contributions):
            piece_bytes = out.nbytes + 1  # one piece, so that all of them have left before it is written
        own = contributions[rank]  # from here on, all is done while the values travel
        own = own.clone() if _is_elsewhere_in(own, outputs[rank % len(outputs)]) else own
        of_ranks = self._with_room_for_others(own)
        opening.receive(list(map(_memory, of_ranks)))
        at = place_of(op, _OPS)
        divisor = n if _OPS[at] is dist.ReduceOp.AVG else 1
        combination = partial(self._backend.combination, how=_COMBINATIONS[at], divisor=divisor)
        return _Sum(self._connections, opening, of_ranks, outputs, combination, piece_bytes)

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _ONE_ROUND_BYTES

    def _with_room_for_others(self, own: Tensor) -> list[Tensor]:
        """This rank's values, and before and behind them memory for those of each other rank, until the next call."""
        n = self._world_size
        received = self._scratch.of("received", (n - 1) * own.numel(), own.dtype)
        of_ranks = [received] if n == 2 else list(received.tensor_split(n - 1))
        of_ranks.insert(self._rank, own)
        return of_ranks


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
        of_ranks: what each rank contributes to this rank's part: this rank's own, and where that of others arrives.
        parts: of the result.
        combination: see `HostBackend.combination`; takes the values of all ranks, and where the result goes as `out`.
        piece_bytes: of a piece, about.
    """

    def __init__(
        self,
        connections: Connections,
        opening: Opening,
        of_ranks: Sequence[Tensor],
        parts: Sequence[Tensor],
        combination: Callable[..., Callable[[], None]],
        piece_bytes: int,
    ):
        self._connections = connections
        self._opening = opening
        self._kept = of_ranks  # which the combinations do not keep
        count = parts[0].nbytes // piece_bytes  # the same on all ranks, which have parts of two sizes
        self._parts = [_cut(part, count) for part in parts]
        self._own = self._parts[connections.rank % len(parts)]
        pieces = zip(self._own, *[_cut(each, count) for each in of_ranks])
        self._combinations = [combination(values, out=output) for output, *values in pieces]

    def finish(self, check: Callable[[], None]) -> None:
        stop = self._own[0].nbytes
        require_placed(_compare(self._opening, check, stop))
        gathers = []
        for at, combine in enumerate(self._combinations):
            if at > 0:
                stop += self._own[at].nbytes
                self._opening.reach(stop)
            combine()
            if len(self._parts) > 1:
                gathers.append(self._connections.start_gather([_memory(pieces[at]) for pieces in self._parts]))
        self._opening.wait()
        for gather in gathers:
            gather.wait()


def _compare(opening: Opening, check: Callable[[], None], nbytes: int = 0) -> list[memoryview]:
    """Compare calls. Returns what came from each other rank and not to its place, once so many bytes are there.

    Raises what `check` raises.
    """
    received = opening.compare(nbytes)
    try:
        check()
    except BaseException:
        opening.wait()  # so that nothing is left of it in the connections
        raise
    return received


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor in one dimension.

    Without autograd, which refuses to write to a parameter; gloo's collectives ignore it as well.
    """
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which must outlive them."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    return _memory_at(host_address(tensor, "a message", tensor.dtype), nbytes, _WRITABLE)


def _cut(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """So many pieces, one at least."""
    return [tensor] if count <= 1 else tensor.tensor_split(count)


def _piece_bytes(link_gbps: float | None) -> int:
    if link_gbps is None or link_gbps >= _FAST_GBPS:
        return _PIECE_BYTES
    return max(round(link_gbps * _LEAST_PIECE_BYTES), _LEAST_PIECE_BYTES)


def _is_elsewhere_in(values: Tensor, output: Tensor, place: Tensor | None = None) -> bool:
    """Whether values lie in the memory of an output, but not in their place there, which is its beginning unless told.

    So they would be overwritten before they are used, or before they have left.
    """
    start, at = output.data_ptr(), values.data_ptr()
    return -values.nbytes < at - start < output.nbytes and at != (start if place is None else place.data_ptr())
