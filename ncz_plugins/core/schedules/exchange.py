"""Schedule of collectives in which each rank sends each other rank a piece, and nothing is summed.

Step after step a rank sends to the rank that is one farther ahead, and takes what has come from as far behind. So a
rank gets one or two large pieces at a time, and small ones all at once. The piece that a rank keeps is copied. On GPUs
all frames travel in one operation of NCCL.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from ..codec.gpu_pieces import GpuPiecesCodec
from ..codec.pieces import PiecesCodec
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import Transport, peer_errors
from ..transport.small import borrowed_memory

_AHEAD_BYTES = 2 << 20  # of values that a rank may have sent before it waits for others: some 300 KiB of frames


def exchange_at_once(transport: Transport, codec: GpuPiecesCodec, counters: Counters) -> None:
    """Do what `exchange` does, with all frames in one plain exchange of bytes: for GPUs."""
    # How long frames are is exchanged on the GPU, so that the host waits once.
    numbers = codec.encode()
    others = _exchanged(transport, numbers, codec.numbers_to, codec.numbers_from, counters)
    messages, going, coming = codec.messages(numbers, others)
    arrived = _exchanged(transport, messages, going, coming, counters)
    codec.decode(arrived.split(coming))


def _exchanged(
    transport: Transport, tensor: Tensor, sent: list[int], received: list[int], counters: Counters
) -> Tensor:
    """What comes from all ranks, for what `tensor` has for them. `sent`, `received`: elements for and of each rank."""
    arrived = tensor.new_empty(sum(received))
    with span("wait", arrived.nbytes, counters), peer_errors("exchanging frames"):
        transport.plain.all_to_all_single(arrived, tensor, received, sent).wait()
    counters.wire_bytes += tensor.nbytes
    return arrived


def exchange_heads(transport: Transport, codec: PiecesCodec, counters: Counters) -> None:
    """Send what was measured of each piece, and receive what other ranks measured."""
    outgoing, incoming = codec.heads
    if transport.exchanges is not None:
        transport.exchanges.send(list(map(borrowed_memory, outgoing)), list(map(borrowed_memory, incoming)))
        counters.wire_bytes += sum(head.nbytes for head in outgoing)
        return
    sizes = [[head.nbytes for head in heads] for heads in codec.heads]
    arrived = _exchanged(transport, torch.cat(outgoing).view(torch.uint8), *sizes, counters).split(sizes[1])
    for head, bytes_of_head in zip(incoming, arrived):
        head.view(torch.uint8).copy_(bytes_of_head)


def exchange(transport: Transport, codec: PiecesCodec, counters: Counters) -> None:
    """Send every rank its piece, and write the pieces of all ranks to the output, frame by frame."""
    # Connect at once with all ranks that send something or get something: one after the other they would wait in turns.
    n, rank, outgoing = transport.world_size, transport.rank, codec.layout.lengths
    others = [(rank + i) % n for i in range(1, n)]
    incoming = {peer: codec.frames_from[peer] for peer in others}
    peers, capacity = [peer for peer in others if incoming[peer] or outgoing[peer]], codec.frame_capacity
    transport.connect(peers)
    streams = {peer: transport.streams([(peer, peer)], [1] * incoming[peer], capacity, counters)[0] for peer in peers}

    # In step i a rank sends to the rank i ahead, and takes what the rank i behind has sent, some steps later. The first
    # step has no wait, so no rank waits for one that waits for it.
    ahead = _steps_ahead(transport, codec)
    for step in range(1, n + ahead):
        frames = codec.encode((rank + step) % n) if step < n else ()
        source = (rank - step + ahead) % n if step > ahead else rank
        for frame, index in zip_longest(frames, range(incoming.get(source, 0))):
            if frame is not None:
                streams[(rank + step) % n].send(frame)
            if index is not None:
                codec.decode(source, index, streams[source].receive())
        if step == n - 1:
            codec.copy_own(rank)  # while they travel
    for stream in streams.values():
        stream.finish()


def _steps_ahead(transport: Transport, codec: PiecesCodec) -> int:
    """How many steps a rank sends before it waits for what came in the first of them.

    If all ranks send a rank their pieces at once, they overflow the buffer of the switch before it, and the end of a
    piece is sent again after 200 ms. Each rank decides for itself.
    """
    n = transport.world_size
    if transport.is_far:  # waits would add up
        return n - 1
    return min(n - 1, 1 + _AHEAD_BYTES * n // max(1, codec.source.data.nbytes))
