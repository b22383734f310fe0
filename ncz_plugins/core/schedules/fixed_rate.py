"""The schedule of a fixed rate: agree on scales, all-to-all, sum at the owner, all-gather, by uncompressed collectives.

All sizes are known before the data are. So on a GPU everything is kernels and operations of NCCL, queued on streams: no
host waits, and a CUDA graph can capture it. On a CPU large tensors go in pieces, so that coding and transfer overlap.
On a GPU coding takes less time than one more operation.

Two ranks need no owner for an all-reduce: each gets all codes of the other one. That is one operation instead of two,
and fewer bytes, since sums take more bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...kernels.format import Rows, packed_bytes
from ..codec.fixed_rate import FixedRateCodec
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, Work, replace_by_largest

_PIECE_BYTES = 1 << 20  # packed, of a row: less would wait for latency
_MOST_PIECES = 4


def reduce_scatter(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write the sum over ranks of this rank's segment to the output."""
    n, rank = transport.world_size, transport.rank
    rows = codec.all_rows
    magnitudes = _agreed(transport, codec, rows, counters)
    own = Rows.of(rows.elements, 1, rows.elements)
    of_own = magnitudes[rank * own.blocks : (rank + 1) * own.blocks]
    for piece, sums in _summed(transport, codec, rows, magnitudes, counters):
        part = own._replace(first=piece.first, blocks=piece.blocks)
        codec.unpack(sums, n, part, of_own, range(rank, rank + 1))


def all_reduce(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write the sum over ranks of all segments to the output."""
    n = transport.world_size
    rows = codec.all_rows
    if not rows.blocks:
        return
    magnitudes = _agreed(transport, codec, rows, counters)
    if n == 2:
        return _all_reduce_of_two(transport, codec, rows, magnitudes, counters)
    gathers = []
    for piece, sums in _summed(transport, codec, rows, magnitudes, counters):
        gathered = sums.new_empty(n * sums.numel())
        gathers.append((piece, gathered, transport.plain.all_gather_into_tensor(gathered, sums), sums))
        counters.wire_bytes += (n - 1) * sums.nbytes
    for piece, gathered, work, _ in gathers:
        _wait(work, gathered, counters)
        codec.unpack(gathered, n, piece, magnitudes, range(n))


def _all_reduce_of_two(
    transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, magnitudes: Tensor, counters: Counters
) -> None:
    gathers = []
    for piece in _pieces(rows, codec.bits, magnitudes.is_cuda):
        packed = codec.pack(piece, magnitudes)
        gathered = packed.new_empty(2 * packed.numel())
        gathers.append((piece, gathered, transport.plain.all_gather_into_tensor(gathered, packed), packed))
        counters.wire_bytes += packed.nbytes
    for piece, gathered, work, _ in gathers:
        _wait(work, gathered, counters)
        codec.unpack(codec.add(gathered, 2), 2, piece, magnitudes, range(2))


def all_gather(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write every rank's own segment to the output."""
    n = transport.world_size
    own = codec.own_rows
    of_own = codec.magnitudes(own)
    packed = codec.pack(own, of_own)
    gathered = []
    for tensor in (of_own, packed):
        together = tensor.new_empty(n * tensor.numel())
        gathered.append((together, transport.plain.all_gather_into_tensor(together, tensor)))
        counters.wire_bytes += (n - 1) * tensor.nbytes
    (magnitudes, first), (codes, second) = gathered
    _wait(first, magnitudes, counters)
    _wait(second, codes, counters)
    codec.unpack(codes, 1, codec.all_rows, magnitudes, range(n))


def broadcast(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters, root: int) -> None:
    """Write the values of rank `root` to the output."""
    n = transport.world_size
    rows = codec.all_rows
    if not rows.blocks:
        return
    # On other ranks this is memory of the right sizes.
    magnitudes = codec.magnitudes(rows)
    packed = codec.pack(rows, magnitudes)
    sent = [(tensor, transport.plain.broadcast(tensor, root)) for tensor in (magnitudes, packed)]
    for tensor, work in sent:
        _wait(work, tensor, counters)
    counters.wire_bytes += (magnitudes.nbytes + packed.nbytes) * (n - 1) // n
    codec.unpack(packed, 1, rows, magnitudes, range(len(codec.layout.lengths)))


def _agreed(transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, counters: Counters) -> Tensor:
    """The largest magnitude over ranks of each block."""
    with span("agree", codec.source.data.nbytes, counters):
        magnitudes = codec.magnitudes(rows)
        with span("wait", magnitudes.nbytes, counters):
            replace_by_largest(transport, magnitudes, counters)
    return magnitudes


def _wait(work: Work, received: Tensor, counters: Counters) -> None:
    """Wait for what is received, and count it. On a GPU only the current stream waits, so hardly anything counts."""
    with span("wait", received.nbytes, counters):
        work.wait()


def _summed(
    transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, magnitudes: Tensor, counters: Counters
) -> Iterator[tuple[Rows, Tensor]]:
    """Yields pieces of all rows, and the sums over ranks of this rank's own row of each."""
    n = transport.world_size
    exchanges = []
    for piece in _pieces(rows, codec.bits, magnitudes.is_cuda):
        packed = codec.pack(piece, magnitudes)
        received = packed.new_empty(packed.numel())
        exchanges.append((piece, received, transport.plain.all_to_all_single(received, packed), packed))
        counters.wire_bytes += packed.nbytes * (n - 1) // n
    for piece, received, work, _ in exchanges:
        _wait(work, received, counters)
        yield piece, codec.add(received, n)


def _pieces(rows: Rows, bits: int, on_gpu: bool) -> Iterator[Rows]:
    """The same rows in a few pieces, each some blocks of all of them; on a GPU in one."""
    count = 1 if on_gpu else min(_MOST_PIECES, max(1, rows.blocks * packed_bytes(bits) // _PIECE_BYTES))
    ends = [rows.blocks * each // count for each in range(count + 1)]
    for first, end in zip(ends, ends[1:]):
        yield rows._replace(first=first, blocks=end - first)
