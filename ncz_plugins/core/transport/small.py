"""Uncompressed collectives of small tensors in host memory, made for latency.

Each rank sends its values to the others in the same message as the numbers that compare the ranks' calls. So if ranks
make different calls all of them raise an error, at no cost. Gloo would end the process or mix up the values.

- Broadcast and all-gather: one round. Values are received straight into the output.
- Reduce-scatter, and all-reduce of 2 ranks or of at most 16 KiB that a rank sends: one round. Each rank adds up.
- Larger all-reduce: two rounds. Each rank adds up one part, and sends the result to all others.
- Exchanges of pieces, of any size: one round, in which ranks also tell each other what they send and expect. Pieces
  above 16 MiB follow in a second one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from ... import kernels
from ...kernels.addresses import host_address
from ...kernels.format import COMBINED_DTYPES, Combination
from ...kernels.scratch import Scratch
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .agreements import MAX_BYTES_WITH_COMPARISON, gather, require_received
from .base import GeneratorWork, Work
from .comparison import RankComparison, place_of
from .connections import Connections
from .mesh import Memory

# A larger all-reduce of more than 2 ranks takes two rounds, in which each rank sends fewer bytes.
_MAX_ONE_ROUND_BYTES = 16 << 10
# Limits of the bytes that a rank sends in one round. Above them gloo is used.
# One round: up to this limit gloo takes longer. Above it, the time of a comparison before gloo's call hardly counts.
_MAX_BYTES = 16 << 20
# Two rounds: gloo's ring takes less of the cores' time, as each rank receives from one other rank only.
_MAX_TWO_ROUNDS_BYTES = 4 << 20
# Broadcast of more than 2 ranks: gloo passes values on from rank to rank, so its root sends less.
_MAX_BROADCAST_BYTES = 256 << 10
_COLLECTIVES = frozenset(("all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast"))
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_COMBINATIONS = (Combination.ADD, Combination.ADD, Combination.MULTIPLY, Combination.LOWEST, Combination.HIGHEST)
# A memoryview at an address, made by Python itself. Training makes small calls seldom, so caches are cold, and then the
# first use of any function of torch or numpy takes 5 to 30 us.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


class SmallCollectives:
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
        """Whether `start` can carry out this call."""
        if self._connections.mesh is None or collective not in _COLLECTIVES:
            return False
        n, in_two_rounds = self._world_size, self._in_two_rounds(collective, input)
        nbytes, most = input.nbytes, _MAX_BYTES
        if in_two_rounds or collective == "reduce_scatter_single":
            nbytes = -(-nbytes // n)
        if in_two_rounds:
            most = _MAX_TWO_ROUNDS_BYTES
        elif collective == "broadcast" and n > 2:
            most = _MAX_BROADCAST_BYTES
        return (
            nbytes <= MAX_BYTES_WITH_COMPARISON
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
        check: Callable[[], None],
    ) -> Work:
        """Begin a call, without a wait.

        Args:
            collective: its name in torch.distributed; `input`, `output` and `op` as there.
            root: the rank within the group that a broadcast starts from.
            comparison: the numbers that ranks compare. It receives the numbers of the other ranks.
            check: raises an error if ranks differ. Called in `wait` before any value is used.

        `wait` raises PeerError, and what `check` raises.
        """
        own = _flat(input)
        out = own if output is input else _flat(output)
        if collective == "broadcast":
            return GeneratorWork(self._broadcast(own, out, root, comparison, check))
        if collective == "all_gather_single":
            return GeneratorWork(self._all_gather(own, out, comparison, check))
        return GeneratorWork(self._reduce(collective, own, out, op, comparison, check))

    def _broadcast(
        self, own: Tensor, out: Tensor, root: int, comparison: RankComparison, check: Callable[[], None]
    ) -> Iterator[None]:
        # Values are received straight into the output.
        n = self._world_size
        values = [borrowed_memory(own if self._rank == root else own[:0])] * n
        memories = [borrowed_memory(out) if peer == root else None for peer in range(n)]
        exchange = self._connections.mesh.tell(values, comparison).receive(0, MAX_BYTES_WITH_COMPARISON, memories)
        yield
        received = exchange.wait()
        check()
        require_received(received)

    def _all_gather(
        self, own: Tensor, out: Tensor, comparison: RankComparison, check: Callable[[], None]
    ) -> Iterator[None]:
        # Values are received straight into the output, each rank's into its part.
        n, rank = self._world_size, self._rank
        parts = out.tensor_split(n)
        own = own.clone() if _overlaps(own, out, parts[rank]) else own
        memories = [borrowed_memory(part) for part in parts]
        exchange = self._connections.mesh.tell([borrowed_memory(own)] * n, comparison)
        exchange.receive(0, MAX_BYTES_WITH_COMPARISON, memories)
        yield
        received = exchange.wait()
        check()
        require_received(received)
        parts[rank].copy_(own)

    def _reduce(
        self,
        collective: str,
        own: Tensor,
        out: Tensor,
        op: dist.ReduceOp,
        comparison: RankComparison,
        check: Callable[[], None],
    ) -> Iterator[None]:
        # What each rank gets from this one, and the parts of the result.
        n, rank, mesh = self._world_size, self._rank, self._connections.mesh
        contributions, outputs = own.tensor_split(n), [out]
        if self._in_two_rounds(collective, own):
            outputs = out.tensor_split(n)
        elif collective == "all_reduce":
            contributions = [own] * n
        exchange = mesh.tell([borrowed_memory(each) for each in contributions], comparison)

        # While the values travel, prepare this rank's sum. The output is written once all values have left.
        mine, output = contributions[rank], outputs[rank % len(outputs)]
        mine = mine.clone() if _overlaps(mine, output) else mine
        received = self._scratch.of("received", (n - 1) * mine.numel(), mine.dtype, mine.device)
        of_ranks = [received] if n == 2 else list(received.tensor_split(n - 1))
        of_ranks.insert(rank, mine)
        exchange.receive(0, MAX_BYTES_WITH_COMPARISON, [borrowed_memory(each) for each in of_ranks])
        number = place_of(op, _OPS)
        divisor = n if _OPS[number] is dist.ReduceOp.AVG else 1
        combine = self._backend.combination(of_ranks, _COMBINATIONS[number], output, divisor)
        yield
        values = exchange.wait()
        check()
        require_received(values)
        combine()

        # With two rounds, each rank sends its part of the result to all others.
        if len(outputs) > 1:
            gather(mesh, rank, [borrowed_memory(each) for each in outputs])

    def _in_two_rounds(self, collective: str, input: Tensor) -> bool:
        """Whether a call is an all-reduce in which each rank adds up one part."""
        n = self._world_size
        return collective == "all_reduce" and n > 2 and input.nbytes * (n - 1) > _MAX_ONE_ROUND_BYTES


class Exchanges:
    """Exchanges of pieces of any size between ranks that have a mesh."""

    def __init__(self, connections: Connections):
        self._mesh = connections.mesh
        self._rank = connections.rank

    def tell(
        self,
        numbers: bytes,
        outgoing: Sequence[Memory],
        incoming: Sequence[Memory],
        comparison: RankComparison,
        check: Callable[[], None],
        counters: Counters,
    ) -> bytes:
        """Compare calls, and tell all ranks numbers in which they may differ. Bytes for each rank travel along.

        What this rank keeps is copied.

        Args:
            numbers: of this rank, as many bytes as the others have.
            outgoing: the bytes for each rank, which may be none.
            incoming: memory for the bytes of each rank, filled if that rank has sent equally many.
            comparison, check: see `SmallCollectives.start`.
            counters: receive the bytes sent and the seconds waited.

        Returns the numbers of all ranks, in rank order.
        """
        rank, ranks, size = self._rank, len(outgoing), len(numbers)
        exchange = self._mesh.tell([(numbers, each) for each in outgoing], comparison)
        told = bytearray(size * ranks)
        rows = [memoryview(told)[at : at + size] for at in range(0, len(told), size)]
        rows[rank][:] = numbers
        largest = max(map(len, incoming))
        exchange.receive(0, size + max(largest, MAX_BYTES_WITH_COMPARISON), list(zip(rows, incoming)))
        if len(incoming[rank]) == len(outgoing[rank]):  # else an error follows
            incoming[rank][:] = outgoing[rank]  # while the other ranks' bytes travel
        counters.wire_bytes += sum(map(len, outgoing)) - len(outgoing[rank])
        counters.wire_bytes += (ranks - 1) * (len(comparison.told) + size)
        with span("wait", size, counters):
            received = exchange.wait()
        check()
        for row, message in zip(rows[:rank] + rows[rank + 1 :], received):
            if message.nbytes:  # not as expected, with no bytes or another number of them: it has memory of its own
                if message.nbytes < size:
                    require_received([message])
                row[:] = message[:size]
        return bytes(told)

    def send(self, outgoing: Sequence[Memory], incoming: Sequence[Memory]) -> None:
        """Send each rank its bytes, and copy what this rank keeps. Ranks must have compared the sizes before."""
        exchange = self._mesh.start(outgoing, 0, max(map(len, incoming)), incoming)
        incoming[self._rank][:] = outgoing[self._rank]  # while the other ranks' bytes travel
        require_received(exchange.wait())


class SmallMessages:
    """Messages from one rank to another, made for latency. Methods are those of SmallCollectives."""

    def __init__(self, connections: Connections):
        self._connections = connections

    def serve(self, collective: str, input: Tensor, op: dist.ReduceOp | None) -> bool:
        return input.nbytes <= MAX_BYTES_WITH_COMPARISON

    def start(
        self,
        collective: str,
        input: Tensor,
        output: Tensor,
        op: dist.ReduceOp | None,
        root: int,
        comparison: RankComparison,
        check: Callable[[], None],
    ) -> Work:
        return GeneratorWork(self._send(borrowed_memory(input), borrowed_memory(output), comparison, check))

    def _send(
        self, own: memoryview, out: memoryview, comparison: RankComparison, check: Callable[[], None]
    ) -> Iterator[None]:
        # One of both is empty. Values are received straight into the output.
        exchange = self._connections.mesh.tell([own] * 2, comparison)
        exchange.receive(0, MAX_BYTES_WITH_COMPARISON, [out] * 2)
        yield
        received = exchange.wait()
        check()
        require_received(received)


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` in one dimension, detached: like gloo's collectives, ours write to parameters."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def borrowed_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, valid while the tensor lives: hold it until the message has left."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(bytearray())
    return _memory_at(host_address(tensor, "a message", tensor.dtype), nbytes, _WRITABLE)


def _overlaps(values: Tensor, output: Tensor, own_part: Tensor | None = None) -> bool:
    """Whether writing to `output` could overwrite `values` before they are used or sent.

    That is so if they share memory, unless `values` begin exactly where their result goes.

    Args:
        own_part: the part of `output` that the values go to; None: its beginning.
    """
    start, at = output.data_ptr(), values.data_ptr()
    return -values.nbytes < at - start < output.nbytes and at != (start if own_part is None else own_part.data_ptr())
