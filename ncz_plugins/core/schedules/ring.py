"""Ring schedule: each rank sends frames to its right neighbor only.

1. Reduce-scatter: in each of n - 1 hops a rank receives a frame, decodes it, adds its own values, encodes and sends.
2. All-gather: finished frames travel around the ring unchanged. A reduce sends them as far as its root.

Hops overlap, as each segment is cut into frames. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations" (2009).
"""

from __future__ import annotations

from ..codec.tensor_codec import TensorCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameStream, FrameTransport


def reduce_scatter(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of this rank's segment to the output."""
    stream = _neighbors(transport, codec, transport.world_size - 1, counters)
    for index, frame in _reduced(transport, codec, stream):
        codec.decode(transport.rank, index, frame)
    stream.finish()


def all_gather(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode every rank's own segment to the output."""
    stream = _neighbors(transport, codec, transport.world_size - 1, counters)
    own = [(transport.rank, index) for index in range(codec.layout.frames)]
    for index, frame in enumerate(codec.encode_each(own)):
        stream.exchange(frame)
        codec.decode(transport.rank, index, frame)
    _forward(transport, codec, stream)
    stream.finish()


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of all segments to the output."""
    stream = _neighbors(transport, codec, 2 * (transport.world_size - 1), counters)
    for index, frame in _reduced(transport, codec, stream):
        stream.exchange(frame)
        codec.decode(transport.rank, index, frame)
    _forward(transport, codec, stream)
    stream.finish()


def reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the sum over ranks of all segments to the output of rank `root`."""
    n, rank = transport.world_size, transport.rank
    from_root = (rank - root) % n  # ranks on the way from the root to here, whose finished segments come by
    behind = n - 1 if rank == root else from_root - 1
    stream = _neighbors(transport, codec, n - 1 + behind, counters)
    for index, frame in _reduced(transport, codec, stream):
        if rank == root:
            codec.decode(rank, index, frame)
        else:
            stream.send(frame)
    for hop in range(1, behind + 1):
        for index in range(codec.layout.frames):
            frame = stream.receive()
            if rank == root:
                codec.decode((rank - hop) % n, index, frame)
            else:
                stream.send(frame)
    stream.finish()


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the values of rank `root` to the output. Frames travel from the root along the ring."""
    first = transport.rank == root
    last = (transport.rank + 1) % transport.world_size == root
    stream = _neighbors(transport, codec, 0 if first else 1, counters)
    indices = range(codec.layout.frames)
    frames = codec.encode_each((0, index) for index in indices) if first else (stream.receive() for _ in indices)
    for index, frame in enumerate(frames):
        if not last:
            stream.send(frame)
        codec.decode(0, index, frame)
    stream.finish()


def _neighbors(transport: FrameTransport, codec: TensorCodec, hops: int, counters: Counters) -> FrameStream:
    """Open the frame stream to the right neighbor and from the left one, which sends a segment in each hop."""
    n, rank = transport.world_size, transport.rank
    incoming = [1] * (hops * codec.layout.frames)
    [stream] = transport.streams([((rank + 1) % n, (rank - 1) % n)], incoming, codec.frame_capacity, counters)
    return stream


def _reduced(transport: FrameTransport, codec: TensorCodec, stream: FrameStream):
    """Reduce-scatter: yield (index, frame) for each finished frame of this rank's own segment."""
    n, rank, frames = transport.world_size, transport.rank, codec.layout.frames
    for frame in codec.encode_each(((rank - 1) % n, index) for index in range(frames)):
        stream.exchange(frame)
    for hop in range(2, n + 1):
        received = ([stream.receive()] for _ in range(frames))
        for index, frame in enumerate(codec.sum_each((rank - hop) % n, received)):
            if hop < n:
                stream.exchange(frame)
            else:
                yield index, frame


def _forward(transport: FrameTransport, codec: TensorCodec, stream: FrameStream) -> None:
    """All-gather: decode the frames of all other segments, and send them on. Own frames have been sent before."""
    n, rank, frames = transport.world_size, transport.rank, codec.layout.frames
    for hop in range(1, n):
        for index in range(frames):
            frame = stream.receive()
            if hop < n - 1:
                stream.exchange(frame)
            codec.decode((rank - hop) % n, index, frame)
