"""The direct schedule: all-to-all, sum at the owner, all-gather.

Each rank encodes its values once and sends every segment straight to its owner. So the first half sends codes of single
ranks, whose entropy is lower than that of partial sums, and there is no chain of hops.

Two ranks need no owner for an all-reduce. Each sends the codes of all its values, and both add them up. That is as much
as the other way, but all of single ranks, and one round instead of two. The tensor may then be one segment. On GPUs
padded.py has the sums of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..codec.tensor_codec import TensorCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameStream, FrameTransport
from . import padded


def reduce_scatter(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of this rank's segment to the output."""
    if transport.world_size == 2 and codec.encodes_ahead:
        return padded.reduce_scatter(transport, codec, counters)
    streams = _peers(transport, codec, 1, counters)
    if codec.sums_to_output:
        for index, frames in enumerate(_exchanged(codec, streams)):
            codec.decode_sum(transport.rank, index, frames)
    else:
        for index, frame in _reduced(transport, codec, streams):
            codec.decode(transport.rank, index, frame)
    _finish(streams)


def all_gather(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode every rank's own segment to the output."""
    streams = _peers(transport, codec, 1, counters)
    own = [(transport.rank, index) for index in range(codec.layout.frames)]
    for index, frame in enumerate(codec.encode_each(own)):
        _publish(transport, codec, streams, index, frame)
    _collect(codec, streams)
    _finish(streams)


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of all segments to the output."""
    if transport.world_size == 2 and codec.encodes_ahead:
        return padded.all_reduce(transport, codec, counters)
    if transport.world_size == 2 and codec.sums_to_output:
        return _all_reduce_of_two(transport, codec, counters)
    streams = _peers(transport, codec, 2, counters)
    for index, frame in _reduced(transport, codec, streams):
        _publish(transport, codec, streams, index, frame)
    _collect(codec, streams)
    _finish(streams)


def _all_reduce_of_two(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    peer = 1 - transport.rank
    segments = len(codec.layout.lengths)
    [stream] = _open(transport, codec, [peer], segments, counters).values()
    places = [(segment, index) for index in range(codec.layout.frames) for segment in range(segments)]
    for frame in codec.encode_each(places):
        stream.exchange(frame)
    for segment, index in places:
        codec.decode_sum(segment, index, [stream.receive()])
    stream.finish()


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the values of rank `root`, which sends them to each peer, to the output."""
    sends = transport.rank == root
    peers = [(root + i) % transport.world_size for i in range(1, transport.world_size)] if sends else [root]
    streams = _open(transport, codec, peers, 0 if sends else 1, counters)
    indices = range(codec.layout.frames)
    frames = codec.encode_each((0, index) for index in indices) if sends else (streams[root].receive() for _ in indices)
    for index, frame in enumerate(frames):
        if sends:
            for stream in streams.values():
                stream.send(frame)
        codec.decode(0, index, frame)
    _finish(streams)


def _peers(transport: FrameTransport, codec: TensorCodec, segments: int, counters: Counters) -> dict[int, FrameStream]:
    """A stream to and from every other rank. Each rank begins with its right neighbor, to spread the load."""
    n, rank = transport.world_size, transport.rank
    return _open(transport, codec, [(rank + i) % n for i in range(1, n)], segments, counters)


def _open(transport: FrameTransport, codec: TensorCodec, peers: list[int], segments: int, counters: Counters):
    """Peer -> a stream to and from it. `segments` is how many segments each peer will send."""
    incoming = segments * codec.layout.frames
    streams = transport.streams([(peer, peer) for peer in peers], incoming, codec.frame_capacity, counters)
    return dict(zip(peers, streams))


def _exchanged(codec: TensorCodec, streams: dict[int, FrameStream]) -> Iterator[list[Tensor]]:
    """Send every segment to its owner, and yield all others' frames of this rank's own, one index after another."""
    places = [(peer, index) for index in range(codec.layout.frames) for peer in streams]
    for (peer, _), frame in zip(places, codec.encode_each(places)):
        streams[peer].exchange(frame)
    for _ in range(codec.layout.frames):
        yield [stream.receive() for stream in streams.values()]


def _reduced(transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream]):
    """Reduce, and yield (index, frame) for each finished frame of this rank's own segment."""
    yield from enumerate(codec.sum_each(transport.rank, _exchanged(codec, streams)))


def _publish(transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream], index: int, frame) -> None:
    """Send a finished frame of this rank's own segment to all peers, each of which sends one of its own."""
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
