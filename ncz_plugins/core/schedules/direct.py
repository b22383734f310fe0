"""The direct schedule: all-to-all, sum at the owner, all-gather.

Each rank encodes its values once and sends every segment straight to its owner. What crosses the
wire first are codes of single ranks, whose entropy is lower than that of partial sums, and there
is no chain of hops.
"""

from __future__ import annotations

from ..codec.tensor_codec import TensorCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameStream, FrameTransport


def reduce_scatter(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output the sum of all ranks' segment `rank`."""
    streams = _peers(transport, codec, 1, counters)
    for index, frame in _reduced(transport, codec, streams):
        codec.decode(transport.rank, index, frame)
    _finish(streams)


def all_gather(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output every rank's own segment."""
    streams = _peers(transport, codec, 1, counters)
    for index in range(codec.layout.frames):
        _publish(transport, codec, streams, index, codec.encode(transport.rank, index))
    _collect(codec, streams)
    _finish(streams)


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output the sum of all ranks' values."""
    streams = _peers(transport, codec, 2, counters)
    for index, frame in _reduced(transport, codec, streams):
        _publish(transport, codec, streams, index, frame)
    _collect(codec, streams)
    _finish(streams)


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode to the output the values of rank `root`, which sends them to each peer."""
    sends = transport.rank == root
    peers = [(root + i) % transport.world_size for i in range(1, transport.world_size)] if sends else [root]
    streams = _open(transport, codec, peers, 0 if sends else 1, counters)
    for index in range(codec.layout.frames):
        frame = codec.encode(0, index) if sends else streams[root].receive()
        if sends:
            for stream in streams.values():
                stream.send(frame)
        codec.decode(0, index, frame)
    _finish(streams)


def _peers(transport: FrameTransport, codec: TensorCodec, segments: int, counters: Counters) -> dict[int, FrameStream]:
    """A stream to and from every other rank; each rank begins with its right neighbor, to spread the load."""
    n, rank = transport.world_size, transport.rank
    return _open(transport, codec, [(rank + i) % n for i in range(1, n)], segments, counters)


def _open(transport: FrameTransport, codec: TensorCodec, peers: list[int], segments: int, counters: Counters):
    """A stream to and from each peer, by rank. So many segments will come from it."""
    incoming = segments * codec.layout.frames
    streams = transport.streams([(peer, peer) for peer in peers], incoming, codec.frame_capacity, counters)
    return dict(zip(peers, streams))


def _reduced(transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream]):
    """Yield (index, frame) of the finished frames of this rank's own segment."""
    for index in range(codec.layout.frames):
        for peer, stream in streams.items():
            stream.exchange(codec.encode(peer, index))
    for index in range(codec.layout.frames):
        frames = [stream.receive() for stream in streams.values()]
        yield index, codec.sum(transport.rank, index, frames)


def _publish(transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream], index: int, frame) -> None:
    """Send a finished frame of our own segment to all, each of whom sends one of theirs."""
    for stream in streams.values():
        stream.exchange(frame)
    codec.decode(transport.rank, index, frame)


def _collect(codec: TensorCodec, streams: dict[int, FrameStream]) -> None:
    """Decode the finished frames of all other segments."""
    for index in range(codec.layout.frames):
        for peer, stream in streams.items():
            codec.decode(peer, index, stream.receive())


def _finish(streams: dict[int, FrameStream]) -> None:
    for stream in streams.values():
        stream.finish()
