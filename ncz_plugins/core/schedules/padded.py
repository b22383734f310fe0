"""The direct schedule of two ranks with GPUs: each gathers the frames of the other one, at lengths that both know.

How long a frame is only the device knows. To ask it, and to tell the peer, takes as long as some kernels. So a call
expects frames as long as those of the calls before, see `Forecast`, and the host queues all of it without a wait:
frames are encoded into memory that is long enough for any, and as much of it is gathered as is expected to hold them.
Their real lengths come with them. At the end the host sees which were cut off. These are gathered once more, as all are
where nothing is expected: then the ranks first agree on the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.format import HEADER_BYTES
from ..codec.tensor_codec import QuantizingCodec
from ..errors import FrameError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, frame_bytes, peer_errors, replace_by_largest
from ..transport.forecast import Forecasts

_ALIGNMENT = 512  # of what is gathered, as of tensors on a GPU
_LENGTH_BYTES = 8  # behind it
_TOGETHER = 1 << 24  # elements that are encoded before the first of them travels

Place = tuple[int, int]  # segment, and frame of it


class PaddedTransport(CollectiveTransport, Protocol):
    """What this schedule needs of a transport.

    Attributes:
        forecasts: how long frames are expected to be. It lasts as long as the ranks are connected.
    """

    forecasts: Forecasts


def all_reduce(transport: PaddedTransport, codec: QuantizingCodec, counters: Counters) -> None:
    """Decode the sum over two ranks of all segments to the output."""
    frames = _PaddedFrames(transport, codec, counters)
    while frames.left:
        gathers = []
        for place, memory in frames.encoded():
            gathered = memory.new_empty(2 * memory.numel())
            with span("send", memory.nbytes), peer_errors("exchanging frames"):
                gathers.append((place, gathered, transport.plain.all_gather_into_tensor(gathered, memory)))
            counters.wire_bytes += memory.nbytes
        for place, gathered, work in gathers:
            with peer_errors("exchanging frames"):
                work.wait()
            frames.decode_sum(place, gathered.chunk(2)[1 - transport.rank])
        frames.check()


class _PaddedFrames:
    """The frames of one call, each in memory that is equally long on both ranks.

    Attributes:
        left: those that are still to be gathered, in the order in which they travel.
    """

    def __init__(self, transport: PaddedTransport, codec: QuantizingCodec, counters: Counters):
        self._transport = transport
        self._codec = codec
        self._counters = counters
        self._forecast = transport.forecasts.of(codec.kind)
        segments = range(len(codec.layout.lengths))
        self._places = [(segment, index) for index in range(codec.layout.frames) for segment in segments]
        self.left = self._places
        self._lengths: dict[Place, int] = {}  # how much of its memory is gathered, as far as that is known
        self._own: dict[Place, tuple[Tensor, Tensor]] = {}  # memory that begins with a frame; its length: int64, [1]
        self._received: dict[Place, Tensor] = {}
        self._decoded: set[Place] = set()

    def encoded(self) -> Iterator[tuple[Place, Tensor]]:
        """All that is left to gather. Nothing comes, on both ranks, once the call must go plain."""
        if self._own:
            yield from self._padded(self.left)
            return
        if expected := self._forecast.sizes:
            self._lengths = dict(zip(self._places, map(self._aligned, expected)))
        for batch in self._batches():
            most = [self._lengths.get(place, self._codec.frame_capacity) for place in batch]
            memory, lengths = self._codec.encode_ahead(batch, most, tell_outcome=bool(expected))
            self._own |= zip(batch, zip(memory, lengths.split(1)))
            if not expected and not self._agree(batch, lengths):
                return
            yield from self._padded(batch)

    def decode_sum(self, place: Place, memory: Tensor) -> None:
        """Take what the peer sent of a place, and write the sum of both ranks' frames to the output."""
        if place not in self._decoded:  # the output may be the memory of what is added
            self._codec.decode_sum(*place, [memory[:-_LENGTH_BYTES]])
        self._received[place] = memory

    def check(self) -> None:
        """Wait until all of it is done, and find what was cut off and is `left`. Raises FrameError."""
        own = torch.cat([length for _, length in self._own.values()])
        headers = [memory[:HEADER_BYTES] for memory in self._received.values()]  # of all places, or of none
        lengths = [memory[-_LENGTH_BYTES:] for memory in self._received.values()]
        own, *seen = self._codec.check(own, *headers, *lengths)
        self.left = []
        if self._codec.bypass:
            return
        longest = []
        for place, ours, header, length in zip(self._places, own.tolist(), seen, seen[len(headers) :]):
            theirs = self._length_of(header, length)
            longest.append(max(ours, theirs))
            if theirs <= self._lengths[place]:
                self._decoded.add(place)
            if longest[-1] > self._lengths[place]:
                self.left.append(place)
                self._lengths[place] = self._aligned(longest[-1])
                self._own[place][0][ours : self._lengths[place]] = 0
        if not self.left:
            self._forecast.learn(longest)

    def _length_of(self, header: Tensor, length: Tensor) -> int:
        """Of a frame of the peer. Raises FrameError if the two that came with it differ, or are impossible."""
        peer, capacity = 1 - self._transport.rank, self._codec.frame_capacity
        theirs = frame_bytes(header.numpy(), peer, HEADER_BYTES, capacity)
        if theirs != length.view(torch.int64).item():
            raise FrameError(
                f"a frame of rank {peer} is damaged: its header says that it has {theirs} bytes, and the length that "
                f"came with it is {length.view(torch.int64).item()}. Suspect the network or memory."
            )
        return theirs

    def _batches(self) -> Iterator[list[Place]]:
        """All places. Few frames are encoded together, so that the first ones travel early; small ones, many."""
        count = max(1, _TOGETHER // max(1, self._codec.layout.frame_elements))
        return (self._places[start : start + count] for start in range(0, len(self._places), count))

    def _agree(self, batch: list[Place], lengths: Tensor) -> bool:
        """Find the longest frame of each place, for which the host waits. Whether the call is still compressed."""
        longest = lengths.clone()
        with peer_errors("agreeing on the lengths of frames"):
            replace_by_largest(self._transport, longest, self._counters)
        self._lengths |= zip(batch, map(self._aligned, self._codec.seen(longest)))
        return not self._codec.bypass

    def _padded(self, places: list[Place]) -> Iterator[tuple[Place, Tensor]]:
        """What is gathered of these, with the length of the frame behind it."""
        for place in places:
            memory, length = self._own[place]
            yield place, torch.cat([memory[: self._lengths[place]], length.view(torch.uint8)])

    def _aligned(self, nbytes: int) -> int:
        return min(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, self._codec.frame_capacity)
