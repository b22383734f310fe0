"""Uncompressed collectives of small tensors in host memory, made for latency.

Each rank sends its values to the others in the same message as the numbers that compare the ranks' calls. So if ranks
make different calls all of them raise an error, at no cost. Gloo would end the process or mix up the values.

- Broadcast and all-gather: one round. Values are received straight into the output.
- Reduce-scatter, and all-reduce of 2 ranks or of at most 16 KiB that a rank sends: one round. Each rank adds up.
- Larger all-reduce: two rounds. Each rank adds up one part, and sends the result to all others.
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
from .connections import Connections, Opening, require_received

# A larger all-reduce of more than 2 ranks takes two rounds, in which each rank sends fewer bytes.
_MAX_ONE_ROUND_BYTES = 16 << 10
# Limits of the bytes that a rank sends in one round. Above them gloo is used.
# One round: up to this limit gloo takes longer. Above it, the time of a comparison before gloo's call hardly counts.
_MAX_BYTES = 16 << 20
# Two rounds: gloo's ring takes less of the cores' time, as each rank receives from one other rank only.
_MAX_TWO_ROUNDS_BYTES = 4 << 20
# Broadcast of more than 2 ranks: gloo passes values on from rank to rank, so its root sends less.
_MAX_BROADCAST_BYTES = 256 << 10
# A sum is combined in pieces, while the rest is on its way: about the bytes that a link carries in half a millisecond.
# On a fast link pieces are larger, as each takes some of the cores' time.
_MIN_PIECE_BYTES = 64 << 10
_PIECE_BYTES = 2 << 20
_FAST_LINK_GBPS = 4.0
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_COMBINATIONS = (Combination.ADD, Combination.ADD, Combination.MULTIPLY, Combination.LOWEST, Combination.HIGHEST)
# A memoryview at an address, made by Python itself. Training makes small calls seldom, so caches are cold, and then the
# first use of any function of torch or numpy takes 5 to 30 us.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


class MeshSmallCollectives(SmallCollectives):
    """Collectives in which every rank sends its values to every other one.

    Sums are added in rank order, so they are bit-identical on all ranks; float16 and bfloat16 are added in float32.
    Memory for other ranks' values is kept for the next sum: at most 16 MiB for each thread that makes calls.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self._rank = connections.rank
        self._world_size = connections.world_size
        self._backend = kernels.cpu_backend()
        self._scratch = Scratch()  # for what other ranks send

    def serve(self, collective: str, input: Tensor, op: dist.ReduceOp | None) -> bool:
        n, in_two_rounds = self._world_size, self._in_two_rounds(collective, input)
        nbytes, most = input.nbytes, _MAX_BYTES
        if in_two_rounds or collective == "reduce_scatter_tensor":
            nbytes = -(-nbytes // n)
        if in_two_rounds:
            most = _MAX_TWO_ROUNDS_BYTES
        elif collective == "broadcast" and n > 2:
            most = _MAX_BROADCAST_BYTES
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

        # Calls whose values are received straight into the output.
        if collective == "broadcast":
            values = [_memory(own if rank == root else own[:0])] * n
            destinations = [_memory(out) if peer == root else None for peer in range(n)]
            return _Copy(self._connections.open(comparison, values).receive(destinations))
        if collective == "all_gather_into_tensor":
            parts = out.tensor_split(n)
            own = own.clone() if _overlaps(own, out, parts[rank]) else own
            opening = self._connections.open(comparison, [_memory(own)] * n).receive(list(map(_memory, parts)))
            return _Copy(opening, own, parts[rank])

        # Calls that combine values: what each rank gets from this one, and the parts of the result.
        if collective == "reduce_scatter_tensor":
            contributions, outputs = own.tensor_split(n), [out]
        elif self._in_two_rounds(collective, input):
            contributions, outputs = own.tensor_split(n), out.tensor_split(n)
        else:
            contributions, outputs = [own] * n, [out]
        opening = self._connections.open(comparison, list(map(_memory, contributions)))

        # While the values travel, prepare the sums. If values to send overlap the output, the sum is one piece, so that
        # all values have left before the output is written.
        piece_bytes = _piece_bytes(link_gbps)
        if len(outputs) == 1 and any(_overlaps(each, out) for each in contributions):
            piece_bytes = out.nbytes + 1
        own = contributions[rank]
        own = own.clone() if _overlaps(own, outputs[rank % len(outputs)]) else own
        of_ranks = self._with_memory_for_others(own)
        opening.receive(list(map(_memory, of_ranks)))
        number = place_of(op, _OPS)
        divisor = n if _OPS[number] is dist.ReduceOp.AVG else 1
        combination = partial(self._backend.combination, how=_COMBINATIONS[number], divisor=divisor)
        return _Sum(self._connections, opening, of_ranks, outputs, combination, piece_bytes)

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        """Whether a call is an all-reduce in which each rank adds up one part."""
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _MAX_ONE_ROUND_BYTES

    def _with_memory_for_others(self, own: Tensor) -> list[Tensor]:
        """A tensor for each rank: this rank's values, and memory for the others', valid until the next call."""
        n = self._world_size
        received = self._scratch.of("received", (n - 1) * own.numel(), own.dtype)
        of_ranks = [received] if n == 2 else list(received.tensor_split(n - 1))
        of_ranks.insert(self._rank, own)
        return of_ranks


class _Copy(SmallWork):
    """Work of a broadcast or all-gather, whose values are received straight into the output.

    Args:
        opening: the messages of the call.
        own: this rank's own values, to copy to `own_part` of the output at the end; None: nothing to copy.
    """

    def __init__(self, opening: Opening, own: Tensor | None = None, own_part: Tensor | None = None):
        self._opening = opening
        self._own = own
        self._own_part = own_part

    def finish(self, check: Callable[[], None]) -> None:
        _compare(self._opening, check)
        require_received(self._opening.wait())
        if self._own is not None:
            self._own_part.copy_(self._own)


class _Sum(SmallWork):
    """Work of a sum or other combination of values, piece by piece as they come.

    With several parts each rank combines one part, and sends each piece of it to the other ranks while the next piece
    is on its way. With a single part every rank combines it.

    Args:
        connections: the connections that carry the pieces.
        opening: the messages of the call.
        of_ranks: for each rank, its values of this rank's part, or the memory where they will arrive.
        parts: the parts of the result.
        combination: see `HostBackend.combination`; takes the values of all ranks, and `out` for the result.
        piece_bytes: approximate size of a piece.
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
        self._kept = of_ranks  # keeps the memory: combinations hold addresses only
        count = parts[0].nbytes // piece_bytes  # by the first part, so that it is the same on all ranks
        self._parts = [_cut(part, count) for part in parts]
        self._own = self._parts[connections.rank % len(parts)]
        pieces = zip(self._own, *[_cut(each, count) for each in of_ranks])
        self._combinations = [combination(values, out=output) for output, *values in pieces]

    def finish(self, check: Callable[[], None]) -> None:
        stop = self._own[0].nbytes
        require_received(_compare(self._opening, check, stop))
        gathers = []
        for number, combine in enumerate(self._combinations):
            if number > 0:
                stop += self._own[number].nbytes
                self._opening.reach(stop)
            combine()
            if len(self._parts) > 1:
                gathers.append(self._connections.start_gather([_memory(pieces[number]) for pieces in self._parts]))
        self._opening.wait()
        for gather in gathers:
            gather.wait()


def _compare(opening: Opening, check: Callable[[], None], nbytes: int = 0) -> list[memoryview]:
    """Compare the ranks' calls. Raises what `check` raises.

    Args:
        nbytes: wait for this many bytes of values as well.

    Returns what other ranks sent that did not go to its destination: see `require_received`.
    """
    received = opening.compare(nbytes)
    try:
        check()
    except BaseException:
        opening.wait()  # leave nothing of this call in the connections
        raise
    return received


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` in one dimension, detached: like gloo's collectives, ours write to parameters."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, valid as long as the tensor lives."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    return _memory_at(host_address(tensor, "a message", tensor.dtype), nbytes, _WRITABLE)


def _cut(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Cut `tensor` into `count` pieces, at least one."""
    return [tensor] if count <= 1 else tensor.tensor_split(count)


def _piece_bytes(link_gbps: float | None) -> int:
    """Approximate size of a piece of a sum on a link; None: unknown, taken to be fast."""
    if link_gbps is None or link_gbps >= _FAST_LINK_GBPS:
        return _PIECE_BYTES
    return max(round(link_gbps * _MIN_PIECE_BYTES), _MIN_PIECE_BYTES)


def _overlaps(values: Tensor, output: Tensor, own_part: Tensor | None = None) -> bool:
    """Whether writing to `output` could overwrite `values` before they are used or sent.

    That is so if they share memory, unless `values` begin exactly where their result goes.

    Args:
        own_part: the part of `output` that the values go to; None: its beginning.
    """
    start, at = output.data_ptr(), values.data_ptr()
    return -values.nbytes < at - start < output.nbytes and at != (start if own_part is None else own_part.data_ptr())
