"""The ring: frames go to the right neighbour only.

Reduce-scatter by hops (decode, add, encode, send), then an all-gather that forwards frames
unchanged. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009), cut into frames so that hops overlap.
"""

from __future__ import annotations

from ..codec.tensor_codec import TensorCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameStream, FrameTransport


def reduce_scatter(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output the sum of all ranks' segment `rank`."""
    stream = _neighbors(transport, codec, transport.world_size - 1, counters)
    for index, frame in _reduced(transport, codec, stream, last_hop_is_sent=False):
        codec.decode(transport.rank, index, frame)
    stream.finish()


def all_gather(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output every rank's own segment."""
    stream = _neighbors(transport, codec, transport.world_size - 1, counters)
    for index in range(codec.layout.frames):
        frame = codec.encode(transport.rank, index)
        stream.exchange(frame)
        codec.decode(transport.rank, index, frame)
    _forward(transport, codec, stream)
    stream.finish()


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode to the output the sum of all ranks' values."""
    stream = _neighbors(transport, codec, 2 * (transport.world_size - 1), counters)
    for index, frame in _reduced(transport, codec, stream, last_hop_is_sent=True):
        codec.decode(transport.rank, index, frame)
    _forward(transport, codec, stream)
    stream.finish()


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode to the output the values of rank `root`: a chain of ranks, the root first."""
    first = transport.rank == root
    last = (transport.rank + 1) % transport.world_size == root
    stream = _neighbors(transport, codec, 0 if first else 1, counters)
    for index in range(codec.layout.frames):
        frame = codec.encode(0, index) if first else stream.receive()
        if not last:
            stream.send(frame)
        codec.decode(0, index, frame)
    stream.finish()


def _neighbors(transport: FrameTransport, codec: TensorCodec, hops: int, counters: Counters) -> FrameStream:
    """To the right, and from the left, whence a segment comes in each of `hops`."""
    n, rank = transport.world_size, transport.rank
    incoming = hops * codec.layout.frames
    [stream] = transport.streams([((rank + 1) % n, (rank - 1) % n)], incoming, codec.frame_capacity, counters)
    return stream


def _reduced(transport: FrameTransport, codec: TensorCodec, stream: FrameStream, last_hop_is_sent: bool):
    """Yield (index, frame) of the finished frames of this rank's own segment."""
    n, rank, frames = transport.world_size, transport.rank, codec.layout.frames
    for index in range(frames):
        stream.exchange(codec.encode((rank - 1) % n, index))
    for hop in range(2, n + 1):
        for index in range(frames):
            frame = codec.reduce((rank - hop) % n, index, stream.receive())
            if hop < n or last_hop_is_sent:
                stream.exchange(frame)
            if hop == n:
                yield index, frame


def _forward(transport: FrameTransport, codec: TensorCodec, stream: FrameStream) -> None:
    """The all-gather's receiving half: every rank's own frames have been sent to the right already."""
    n, rank, frames = transport.world_size, transport.rank, codec.layout.frames
    for hop in range(1, n):
        for index in range(frames):
            frame = stream.receive()
            if hop < n - 1:
                stream.exchange(frame)
            codec.decode((rank - hop) % n, index, frame)
