"""Schedule for a fixed number of bits for each value, built from uncompressed collectives.

1. The ranks agree on scales: an all-reduce of the largest magnitude of each block.
2. All-to-all: each rank sends its codes of a row to the row's owner, the rank with the same number.
3. The owner adds up the codes of its row.
4. All-gather: the owner sends the sums to all ranks. In a reduce it sends them to the root.

All sizes are known beforehand. So a call on a GPU is kernels and NCCL operations queued on CUDA streams: the host does
not wait, and a CUDA graph can capture the call. On a CPU a large tensor goes in several batches of blocks, so that
coding and transfer overlap. On a GPU one more operation would take longer than the coding that it hides.

Pieces that ranks exchange without a sum travel as magnitudes and codes of the sender's: two all-to-alls.

An all-reduce of two ranks needs one all-gather of all codes. That is one operation instead of two, and fewer bytes, as
sums take more bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...kernels.format import Rows, packed_bytes
from ..codec.fixed_rate import FixedRateCodec, FixedRatePieces
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, Work, replace_by_largest

_MIN_BATCH_BYTES = 1 << 20  # codes of one row in a batch; smaller messages take mostly latency
_MAX_BATCHES = 4


def reduce_scatter(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write the sum over ranks of this rank's segment to the output."""
    n, rank = transport.world_size, transport.rank
    rows = codec.all_rows
    magnitudes = _agreed(transport, codec, rows, counters)
    own = Rows.of(rows.elements, 1, rows.elements)
    own_magnitudes = magnitudes[rank * own.blocks : (rank + 1) * own.blocks]
    for batch, received in _exchanged(transport, codec, rows, magnitudes, counters):
        own_batch = own._replace(first=batch.first, blocks=batch.blocks)
        codec.unpack_sum(received, n, own_batch, own_magnitudes, range(rank, rank + 1))


def all_reduce(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write the sum over ranks of all segments to the output."""
    n = transport.world_size
    rows = codec.all_rows
    if not rows.blocks:
        return
    magnitudes = _agreed(transport, codec, rows, counters)
    if n == 2:
        return _all_reduce_of_two(transport, codec, rows, magnitudes, counters)

    # Queue everything first: each all-gather runs while the next batch is added up.
    gathers = []
    for batch, received in _exchanged(transport, codec, rows, magnitudes, counters):
        sums = codec.add(received, n)
        gathered = sums.new_empty(n * sums.numel())
        gathers.append((batch, gathered, transport.plain.all_gather_single(gathered, sums), sums))
        counters.wire_bytes += (n - 1) * sums.nbytes

    for batch, gathered, work, _ in gathers:
        _wait(work, gathered, counters)
        codec.unpack(gathered, n, batch, magnitudes, range(n))


def _all_reduce_of_two(
    transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, magnitudes: Tensor, counters: Counters
) -> None:
    """All-gather the codes of both ranks, then add them up on both."""
    gathers = []
    for batch in _batches(rows, codec.bits, magnitudes.is_cuda):
        packed = codec.pack(batch, magnitudes)
        gathered = packed.new_empty(2 * packed.numel())
        gathers.append((batch, gathered, transport.plain.all_gather_single(gathered, packed), packed))
        counters.wire_bytes += packed.nbytes
    for batch, gathered, work, _ in gathers:
        _wait(work, gathered, counters)
        codec.unpack_sum(gathered, 2, batch, magnitudes, range(2))


def reduce(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters, root: int) -> None:
    """Write the sum over ranks of all segments to the output of rank `root`."""
    n, is_root = transport.world_size, transport.rank == root
    rows = codec.all_rows
    if not rows.blocks:
        return
    magnitudes = _agreed(transport, codec, rows, counters)

    # Queue everything first: owners send the sums of a batch to the root while the next one is added up.
    under_way = []
    for batch, received in _exchanged(transport, codec, rows, magnitudes, counters):
        sums = codec.add(received, n)
        sent = [sums.numel() if rank == root else 0 for rank in range(n)]
        coming = [sums.numel() if is_root else 0] * n
        gathered = sums.new_empty(sum(coming))
        under_way.append((batch, gathered, transport.plain.all_to_all_single(gathered, sums, coming, sent), sums))
        counters.wire_bytes += 0 if is_root else sums.nbytes
    for batch, gathered, work, _ in under_way:
        _wait(work, gathered, counters)
        if is_root:
            codec.unpack(gathered, n, batch, magnitudes, range(n))


def all_gather(transport: CollectiveTransport, codec: FixedRateCodec, counters: Counters) -> None:
    """Write every rank's own segment to the output."""
    n = transport.world_size
    own = codec.own_rows
    own_magnitudes = codec.magnitudes(own)
    packed = codec.pack(own, own_magnitudes)
    gathered = []
    for tensor in (own_magnitudes, packed):
        together = tensor.new_empty(n * tensor.numel())
        gathered.append((together, transport.plain.all_gather_single(together, tensor)))
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
    # All ranks measure and encode, but only the root's result is used: on other ranks it is overwritten.
    magnitudes = codec.magnitudes(rows)
    packed = codec.pack(rows, magnitudes)
    sent = [(tensor, transport.plain.broadcast(tensor, root)) for tensor in (magnitudes, packed)]
    for tensor, work in sent:
        _wait(work, tensor, counters)
    counters.wire_bytes += (magnitudes.nbytes + packed.nbytes) * (n - 1) // n
    codec.unpack(packed, 1, rows, magnitudes, range(len(codec.layout.lengths)))


def exchange(transport: CollectiveTransport, codec: FixedRatePieces, counters: Counters) -> None:
    """Send every rank its piece, and write the pieces of all ranks to the output."""
    sent, received = codec.sent_blocks, codec.received_blocks
    under_way = []
    for rows in codec.encode():  # magnitudes travel while codes are packed
        arrived = rows.new_empty(sum(received), rows.shape[1])
        under_way.append((arrived, transport.plain.all_to_all_single(arrived, rows, received, sent), rows))
        counters.wire_bytes += rows.nbytes
    for arrived, work, _ in under_way:
        _wait(work, arrived, counters)
    codec.decode(*(arrived for arrived, *_ in under_way))


def _agreed(transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, counters: Counters) -> Tensor:
    """Measure, and agree on the largest magnitude over ranks of each block: bfloat16, [blocks]."""
    with span("agree", codec.source.data.nbytes, counters):
        magnitudes = codec.magnitudes(rows)
        with span("wait", magnitudes.nbytes, counters):
            replace_by_largest(transport, magnitudes, counters)
    return magnitudes


def _wait(work: Work, received: Tensor, counters: Counters) -> None:
    """Wait for `received`, and count the time. On a GPU the host does not wait, so the time is close to 0."""
    with span("wait", received.nbytes, counters):
        work.wait()


def _exchanged(
    transport: CollectiveTransport, codec: FixedRateCodec, rows: Rows, magnitudes: Tensor, counters: Counters
) -> Iterator[tuple[Rows, Tensor]]:
    """All-to-all: yield each batch of blocks, and all ranks' codes of this rank's own row in it: uint8, [bytes]."""
    n = transport.world_size
    under_way = []
    for batch in _batches(rows, codec.bits, magnitudes.is_cuda):
        packed = codec.pack(batch, magnitudes)
        received = packed.new_empty(packed.numel())
        under_way.append((batch, received, transport.plain.all_to_all_single(received, packed), packed))
        counters.wire_bytes += packed.nbytes * (n - 1) // n
    for batch, received, work, _ in under_way:
        _wait(work, received, counters)
        yield batch, received


def _batches(rows: Rows, bits: int, on_gpu: bool) -> Iterator[Rows]:
    """Cut all rows into batches at the same blocks: at most 4 on a CPU, 1 on a GPU."""
    count = 1 if on_gpu else min(_MAX_BATCHES, max(1, rows.blocks * packed_bytes(bits) // _MIN_BATCH_BYTES))
    ends = [rows.blocks * each // count for each in range(count + 1)]
    for first, end in zip(ends, ends[1:]):
        yield rows._replace(first=first, blocks=end - first)
