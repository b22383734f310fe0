"""Halving schedule: ranks exchange half of what they have left with one other rank at a time. For many ranks.

1. Reduce-scatter: the ranks split in two halves, those of even and of odd number, and so do the segments. Each rank has
   a partner in the other half, its neighbor, and sends it the sums that it knows of the other half's segments. Each
   half then splits likewise, until a rank is alone. It adds up the segment that it is left with.
2. All-gather: finished frames go the same way back, unchanged. A rank gets them from those that it sent sums to.

If there are more ranks than segments, the ranks of a half without segments send all they know, and are done: a tensor
of one segment goes up a tree, and down again. If a half has one rank more than the other, that rank deals its sums out
to several ranks of the other half, so that none gets twice as much.

Most bytes go to the nearest ranks, which often share a rack. A rank talks to about log2(ranks) others. Frames of small
segments that go to the same rank travel in one message, so a small call takes about 2 log2(ranks) messages.
Source: Rabenseifner, "Optimization of collective reduction operations" (2004), which knows powers of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ...kernels.format import CHUNK
from ..codec.layout import Layout
from ..codec.tensor_codec import TensorCodec
from ..runtime.statistics import Counters
from ..transport.base import FrameStream, FrameTransport

# More and smaller segments would take more frames, which cost more than the bytes that they save.
_MOST_SEGMENTS = 64
_LEAST_ELEMENTS = 4 * CHUNK
_MESSAGE_ELEMENTS = 64 * CHUNK  # 1 MiB of float32: coding more before it is sent costs more than messages
_MOST_TAKERS = 4  # ranks among which one without a partner deals out its sums


class Half(NamedTuple):
    """Ranks that add up some segments among themselves."""

    ranks: range
    segments: range


class Leg(NamedTuple):
    """Segments that one rank sends another, in this order: that in which the other one sends them on."""

    peer: int
    segments: tuple[int, ...]


class Route(NamedTuple):
    """The way of the segments, as one rank sees it.

    Attributes:
        sums: what this rank sends in the reduce-scatter, in this order.
        own: the segment that it adds up; empty if there is none.
        sources: the ranks that send it sums, by segment, in the order in which they come.
    """

    sums: tuple[Leg, ...]
    own: range
    sources: Mapping[int, tuple[int, ...]]


def segments_for(elements: int, ranks: int) -> int:
    """Segments in which `ranks` best add up a tensor. A reduce-scatter has one for each rank."""
    return max(1, min(ranks, _MOST_SEGMENTS, elements // _LEAST_ELEMENTS))


def reduce_scatter(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of this rank's segment to the output."""
    route = _route(transport, codec)
    streams = _open(transport, codec, [_given(route)], [_taken(route)], counters)
    _send_sums(codec, route, streams)
    if codec.sums_to_output:
        for index, frames in enumerate(_received(codec, route, streams, transport.rank)):
            codec.decode_sum(transport.rank, index, frames)
    else:
        for segment, index, frame in _own_frames(codec, route, streams):
            codec.decode(segment, index, frame)
    _finish(streams)


def all_gather(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode every rank's own segment to the output."""
    route = _route(transport, codec)
    streams = _open(transport, codec, [_taken(route)], [_given(route)], counters)
    own = [(transport.rank, index) for index in range(codec.layout.frames)]
    _spread(codec, route, streams, ((*each, frame) for each, frame in zip(own, codec.encode_each(own))))
    _finish(streams)


def all_reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters) -> None:
    """Decode the sum over ranks of all segments to the output."""
    route = _route(transport, codec)
    given, taken = _given(route), _taken(route)
    streams = _open(transport, codec, [given, taken], [taken, given], counters)
    _send_sums(codec, route, streams)
    _spread(codec, route, streams, _own_frames(codec, route, streams))
    _finish(streams)


def reduce(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the sum over ranks of all segments to the output of rank `root`, which gets each from its owner."""
    # Besides what comes in a reduce-scatter, the root gets a segment from each owner.
    route, segments = _route(transport, codec), range(len(codec.layout.lengths))
    owners = {segment: _owner(segment, Half(range(transport.world_size), segments)) for segment in segments}
    is_root = transport.rank == root
    to_root = Counter(owner for owner in owners.values() if is_root and owner != root)
    from_here = {root: len(route.own)} if route.own and not is_root else {}
    streams = _open(transport, codec, [_given(route), from_here], [_taken(route), to_root], counters)
    _send_sums(codec, route, streams)

    # Owners send what is finished straight to the root: on a way over others it would have as many frames.
    for segment, index, frame in _own_frames(codec, route, streams):
        if is_root:
            codec.decode(segment, index, frame)
        else:
            streams[root].send(frame)
    for segment, owner in owners.items() if is_root else ():
        for index in range(codec.layout.frames) if owner != root else ():
            codec.decode(segment, index, streams[owner].receive())
    _finish(streams)


def broadcast(transport: FrameTransport, codec: TensorCodec, counters: Counters, root: int) -> None:
    """Decode the values of rank `root` to the output: the way back of one segment, whose owner is the first rank."""
    n = transport.world_size
    route = route_of((transport.rank - root) % n, n, 1)
    streams = _open(transport, codec, [_taken(route)], [_given(route)], counters, first=root)
    own = [(segment, index) for segment in route.own for index in range(codec.layout.frames)]
    _spread(codec, route, streams, ((*each, frame) for each, frame in zip(own, codec.encode_each(own))))
    _finish(streams)


# ---------------------------------------------------------------- who sends what to whom


@lru_cache(maxsize=64)
def route_of(rank: int, ranks: int, segments: int) -> Route:
    """The route of one of `ranks`, for at most as many segments."""
    sums, sources, group = [], {}, Half(range(ranks), range(segments))
    while len(group.ranks) > 1:
        # What this rank sends to the other half, then what comes from there. It goes on with its own half.
        ours, theirs = _split(group, rank)
        sums += [Leg(peer, _in_order(peer, theirs, run)) for peer, run in _dealt(rank, ours, theirs)]
        for peer in _senders(rank, ours, theirs):
            for _, run in [each for each in _dealt(peer, theirs, ours) if each[0] == rank]:
                for segment in run:
                    sources[segment] = (*sources.get(segment, ()), peer)
        group = ours
    return Route(tuple(sums), group.segments, sources)


def _split(group: Half, rank: int) -> tuple[Half, Half]:
    """The half of a group that holds `rank`, then the other one. Segments are divided as ranks are."""
    even, odd = Half(group.ranks[::2], group.segments[::2]), Half(group.ranks[1::2], group.segments[1::2])
    return (even, odd) if rank in even.ranks else (odd, even)


def _dealt(rank: int, ours: Half, theirs: Half) -> list[tuple[int, range]]:
    """The ranks of the other half to which a rank sends sums, and of which segments."""
    place, segments = ours.ranks.index(rank), theirs.segments
    takers = theirs.ranks[place : place + 1] or theirs.ranks[:_MOST_TAKERS]
    cuts = [len(segments) * i // len(takers) for i in range(len(takers) + 1)]
    return [(peer, segments[a:b]) for peer, a, b in zip(takers, cuts, cuts[1:]) if a < b]


def _senders(rank: int, ours: Half, theirs: Half) -> list[int]:
    """The ranks of the other half that may send sums to a rank: its partner, and the one without a partner."""
    place = ours.ranks.index(rank)
    partner, alone = theirs.ranks[place : place + 1], theirs.ranks[len(ours.ranks) :]
    return [*partner, *alone]


def _in_order(rank: int, half: Half, wanted: range) -> tuple[int, ...]:
    """The wanted ones of a half's segments, in the order in which one of its ranks is done with them."""
    return tuple(segment for segment in _order(rank, half) if segment in wanted)


@lru_cache(maxsize=4096)  # for ncz plan, which asks for the routes of all ranks
def _order(rank: int, half: Half) -> tuple[int, ...]:
    """The segments of a half in the order in which one of its ranks sends sums of them. Its own is the last."""
    if len(half.segments) <= 1:
        return tuple(half.segments)
    ours, theirs = _split(half, rank)
    sent = [segment for peer, run in _dealt(rank, ours, theirs) for segment in _in_order(peer, theirs, run)]
    return (*sent, *_order(rank, ours))


def _owner(segment: int, group: Half) -> int:
    """The rank that adds up a segment."""
    while len(group.ranks) > 1:
        group = next(half for half in _split(group, group.ranks[0]) if segment in half.segments)
    return group.ranks[0]


# ---------------------------------------------------------------- moving frames


def _route(transport: FrameTransport, codec: TensorCodec) -> Route:
    return route_of(transport.rank, transport.world_size, len(codec.layout.lengths))


def _given(route: Route) -> Mapping[int, int]:
    """The number of segments of which this rank sends each peer sums. The same number comes back finished."""
    return {leg.peer: len(leg.segments) for leg in route.sums}


def _taken(route: Route) -> Mapping[int, int]:
    """The number of segments of which each peer sends sums. The same number goes back finished."""
    return Counter(peer for peers in route.sources.values() for peer in peers)


def _messages(layout: Layout, segments: int) -> list[int]:
    """The number of frames in each message that carries the frames of so many segments."""
    together = max(1, _MESSAGE_ELEMENTS // min(layout.frame_elements, max(1, *layout.lengths)))
    frames = segments * layout.frames
    return [min(together, frames - first) for first in range(0, frames, together)]


class _Peer:
    """Frames to and from another rank, of which messages hold one or several.

    Args:
        stream: the stream of frames with that rank.
        outgoing: the number of frames in each message to it.
    """

    def __init__(self, stream: FrameStream, outgoing: Iterable[int]):
        self._outgoing = iter(outgoing)
        self._waiting: list[Tensor] = []
        self._wanted = next(self._outgoing, 0)  # frames of the next message
        self._stream = stream
        self.receive, self.finish = stream.receive, stream.finish

    def send(self, frame: Tensor) -> None:
        """Send a frame as soon as its message is complete."""
        self._waiting.append(frame)
        if len(self._waiting) == self._wanted:
            self._stream.send(*self._waiting)
            self._waiting, self._wanted = [], next(self._outgoing, 0)


def _open(
    transport: FrameTransport,
    codec: TensorCodec,
    outgoing: Sequence[Mapping[int, int]],
    incoming: Sequence[Mapping[int, int]],
    counters: Counters,
    first: int = 0,
) -> dict[int, _Peer]:
    """Open a frame stream with each rank to which something goes or from which something comes.

    Args:
        outgoing, incoming: the number of segments that go to each rank, and that come from it, by its number in the
            route. Those of different mappings travel one after another, in messages of their own.
        first: the rank that the route calls 0.
    """
    peers, n, layout = {}, transport.world_size, codec.layout
    for peer in dict.fromkeys(rank for each in (*outgoing, *incoming) for rank in each):
        going, coming = (
            [frames for each in way for frames in _messages(layout, each.get(peer, 0))] for way in (outgoing, incoming)
        )
        ends = ((peer + first) % n,) * 2
        [stream] = transport.streams([ends], coming, codec.frame_capacity, counters)
        peers[peer] = _Peer(stream, going)
    return peers


def _send_sums(codec: TensorCodec, route: Route, streams: dict[int, _Peer]) -> None:
    """Reduce-scatter: send all sums but the rank's own. Each frame that comes is added when its sum is wanted."""
    for peer, segments in route.sums:
        for segment in segments:
            for frame in codec.sum_each(segment, _received(codec, route, streams, segment)):
                streams[peer].send(frame)


def _received(codec: TensorCodec, route: Route, streams: dict[int, _Peer], segment: int) -> Iterator[list[Tensor]]:
    """For each frame of a segment, the frames that other ranks send of it."""
    for _ in range(codec.layout.frames):
        yield [streams[peer].receive() for peer in route.sources.get(segment, ())]


def _own_frames(codec: TensorCodec, route: Route, streams: dict[int, _Peer]) -> Iterator[tuple[int, int, Tensor]]:
    """Reduce-scatter: yield (segment, index, frame) for each finished frame of this rank's own segment."""
    for segment in route.own:
        for index, frame in enumerate(codec.sum_each(segment, _received(codec, route, streams, segment))):
            yield segment, index, frame


def _spread(
    codec: TensorCodec, route: Route, streams: dict[int, _Peer], own: Iterable[tuple[int, int, Tensor]]
) -> None:
    """All-gather: decode all finished frames, each of which goes to the ranks that sent sums of its segment.

    Ranks that come last in a route send on the most, so they are served first.

    Args:
        own: (segment, index, frame) of this rank's own segment.
    """
    for segment, index, frame in _with_those_of_others(codec, route, streams, own):
        for peer in reversed(route.sources.get(segment, ())):
            streams[peer].send(frame)
        codec.decode(segment, index, frame)


def _with_those_of_others(
    codec: TensorCodec, route: Route, streams: dict[int, _Peer], own: Iterable[tuple[int, int, Tensor]]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield what `own` has, then the finished frames of all other segments, in the reverse order of their sums."""
    yield from own
    for peer, segments in reversed(route.sums):
        for segment in reversed(segments):
            for index in range(codec.layout.frames):
                yield segment, index, streams[peer].receive()


def _finish(streams: dict[int, _Peer]) -> None:
    for stream in streams.values():
        stream.finish()
