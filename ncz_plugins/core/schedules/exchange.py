"""Schedule of collectives in which each rank sends each other rank a piece, and nothing is summed.

All pieces are under way at once. Each rank begins with the next rank, as all links would wait for rank 0 otherwise. The
piece that a rank keeps is copied. On GPUs all frames travel in one operation of NCCL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec.gpu_pieces import GpuPiecesCodec
from ..codec.pieces import PiecesCodec
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import FrameTransport, Transport, peer_errors
from ..transport.small import borrowed_memory


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


def exchange(transport: FrameTransport, codec: PiecesCodec, counters: Counters) -> None:
    """Send every rank its piece, and write the pieces of all ranks to the output, frame by frame."""
    # Connect at once with all ranks that send something or get something: one after the other they would wait in turns.
    n, rank, outgoing = transport.world_size, transport.rank, codec.layout.lengths
    others = [(rank + i) % n for i in range(1, n)]
    incoming = {peer: codec.frames_from[peer] for peer in others}
    peers, capacity = [peer for peer in others if incoming[peer] or outgoing[peer]], codec.frame_capacity
    transport.connect(peers)
    streams = {peer: transport.streams([(peer, peer)], [1] * incoming[peer], capacity, counters)[0] for peer in peers}

    # Frames go to all ranks in turns, each as soon as it is coded. What this rank keeps is copied while they travel.
    pieces = {peer: codec.encode(peer) for peer in peers}
    for _ in range(max(codec.frame_counts(codec.layout))):
        for peer, frames in pieces.items():
            if (frame := next(frames, None)) is not None:
                streams[peer].send(frame)
    codec.copy_own(rank)

    # They come in turns, too.
    for index in range(max(incoming.values(), default=0)):
        for peer, stream in streams.items():
            if index < incoming[peer]:
                codec.decode(peer, index, stream.receive())
    for stream in streams.values():
        stream.finish()
