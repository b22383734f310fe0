"""Direct schedule: each rank sends frames to all other ranks.

1. All-to-all: each rank encodes its values once, and sends each segment to its owner, the rank with the same number.
2. The owner adds up the frames of its segment.
3. All-gather: the owner sends the sum to all other ranks. In a reduce it sends the sum to the root.

Compared with a ring there is no chain of hops, and step 1 sends codes of single ranks, which have less entropy than
partial sums.

An all-reduce of two ranks needs only one round: each rank sends the codes of all its values, and both add them up. The
tensor may then be one segment. In a reduce only the root gets them. On GPUs the sums of two ranks are in padded.py.
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
        for index, frames in enumerate(_frames_to_add(codec, streams)):
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
        _send_to_all(transport, codec, streams, index, frame)
    _receive_all(codec, streams)
    _finish(streams)


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of all segments to the output."""
    if transport.world_size == 2 and codec.encodes_ahead:
        return padded.all_reduce(transport, codec, counters)
    if transport.world_size == 2 and codec.sums_to_output:
        return _all_reduce_of_two(transport, codec, counters)
    streams = _peers(transport, codec, 2, counters)
    for index, frame in _reduced(transport, codec, streams):
        _send_to_all(transport, codec, streams, index, frame)
    _receive_all(codec, streams)
    _finish(streams)


def _all_reduce_of_two(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Send all own frames to the other rank, then add its frames to the own values."""
    peer = 1 - transport.rank
    segments = len(codec.layout.lengths)
    [stream] = _open(transport, codec, [peer], segments, counters).values()
    frame_ids = [(segment, index) for index in range(codec.layout.frames) for segment in range(segments)]
    for frame in codec.encode_each(frame_ids):
        stream.exchange(frame)
    for segment, index in frame_ids:
        codec.decode_sum(segment, index, [stream.receive()])
    stream.finish()


def reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the sum over ranks of all segments to the output of rank `root`."""
    if transport.world_size == 2 and codec.sums_to_output:
        return _reduce_of_two(transport, codec, counters, root)
    is_root = transport.rank == root
    streams = _peers(transport, codec, 2 if is_root else 1, counters)
    for index, frame in _reduced(transport, codec, streams):
        if is_root:
            codec.decode(root, index, frame)
        else:
            streams[root].send(frame)
    if is_root:
        _receive_all(codec, streams)
    _finish(streams)


def _reduce_of_two(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Send all own frames to the root, which adds them to its own values."""
    segments, is_root = len(codec.layout.lengths), transport.rank == root
    [stream] = _open(transport, codec, [1 - transport.rank], segments if is_root else 0, counters).values()
    frame_ids = [(segment, index) for index in range(codec.layout.frames) for segment in range(segments)]
    if is_root:
        for segment, index in frame_ids:
            codec.decode_sum(segment, index, [stream.receive()])
    else:
        for frame in codec.encode_each(frame_ids):
            stream.send(frame)
    stream.finish()


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the values of rank `root` to the output. The root sends to each other rank."""
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
    """Open a frame stream with each other rank, the right neighbor first, which spreads the load over links."""
    n, rank = transport.world_size, transport.rank
    return _open(transport, codec, [(rank + i) % n for i in range(1, n)], segments, counters)


def _open(transport: FrameTransport, codec: TensorCodec, peers: list[int], segments: int, counters: Counters):
    """Open a frame stream with each of `peers`, each of which will send `segments` segments. Returns rank -> stream."""
    incoming = [1] * (segments * codec.layout.frames)
    streams = transport.streams([(peer, peer) for peer in peers], incoming, codec.frame_capacity, counters)
    return dict(zip(peers, streams))


def _frames_to_add(codec: TensorCodec, streams: dict[int, FrameStream]) -> Iterator[list[Tensor]]:
    """All-to-all: yield, for each frame of this rank's own segment, the frames that the other ranks sent."""
    frame_ids = [(peer, index) for index in range(codec.layout.frames) for peer in streams]
    for (peer, _), frame in zip(frame_ids, codec.encode_each(frame_ids)):
        streams[peer].exchange(frame)
    for _ in range(codec.layout.frames):
        yield [stream.receive() for stream in streams.values()]


def _reduced(transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream]):
    """Reduce-scatter: yield (index, frame) for each finished frame of this rank's own segment."""
    yield from enumerate(codec.sum_each(transport.rank, _frames_to_add(codec, streams)))


def _send_to_all(
    transport: FrameTransport, codec: TensorCodec, streams: dict[int, FrameStream], index: int, frame
) -> None:
    """Send a finished frame of this rank's own segment to all other ranks, and decode it."""
    for stream in streams.values():
        stream.exchange(frame)
    codec.decode(transport.rank, index, frame)


def _receive_all(codec: TensorCodec, streams: dict[int, FrameStream]) -> None:
    """Receive and decode the finished frames of all other segments."""
    for index in range(codec.layout.frames):
        for peer, stream in streams.items():
            codec.decode(peer, index, stream.receive())


def _finish(streams: dict[int, FrameStream]) -> None:
    for stream in streams.values():
        stream.finish()
