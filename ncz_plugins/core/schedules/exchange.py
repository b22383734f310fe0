"""Schedule of collectives in which each rank sends each other rank a piece, and nothing is summed.

All pieces are under way at once. Each rank begins with the next rank, as all links would wait for rank 0 otherwise. The
piece that a rank keeps is copied.
"""

from __future__ import annotations

from itertools import zip_longest

from ..codec.pieces import PiecesCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameTransport


def exchange(transport: FrameTransport, codec: PiecesCodec, counters: Counters) -> None:
    """Send every rank its piece, and write the pieces of all ranks to the output."""
    n, rank = transport.world_size, transport.rank
    peers = [(rank + i) % n for i in range(1, n)]
    capacity, incoming = codec.frame_capacity, {peer: codec.frames_from(peer) for peer in peers}
    streams = {peer: transport.streams([(peer, peer)], incoming[peer], capacity, counters)[0] for peer in peers}
    codec.copy_own(rank)

    # Frames go to all ranks in turns, so that each can begin to decode.
    for frames in zip_longest(*(codec.encode(peer) for peer in peers)):
        for peer, frame in zip(peers, frames):
            if frame is not None:
                streams[peer].send(frame)

    # They come in turns, too.
    for index in range(max(incoming.values())):
        for peer, stream in streams.items():
            if index < incoming[peer]:
                codec.decode(peer, index, stream.receive())
    for stream in streams.values():
        stream.finish()
