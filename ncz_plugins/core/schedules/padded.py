"""The direct schedule of two ranks with GPUs: each gathers the frames of the other one, at lengths that both know.

How long a frame is only the device knows. To ask it, and to tell the peer, takes as long as some kernels. So a call
expects frames as long as those of the calls before, see `Forecast`, and the host queues all of it without a wait:
frames are encoded into memory that is long enough for any, and as much of it is gathered as is expected to hold them.
What the header says about the length shows at the end whether a frame was cut off. Such frames are gathered once more,
as are all where nothing is expected, for which ranks first agree on the longest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.format import HEADER_BYTES
from ..codec.tensor_codec import QuantizingCodec
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, frame_bytes, peer_errors, replace_by_largest

_ALIGNMENT = 512  # of what is gathered, as of tensors on a GPU
_TOGETHER = 1 << 24  # elements that are encoded before the first of them travels

Place = tuple[int, int]  # segment, and frame of it


def all_reduce(transport: CollectiveTransport, codec: QuantizingCodec, counters: Counters) -> None:
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

    def __init__(self, transport: CollectiveTransport, codec: QuantizingCodec, counters: Counters):
        self._transport = transport
        self._codec = codec
        self._counters = counters
        segments = range(len(codec.layout.lengths))
        self._places = [(segment, index) for index in range(codec.layout.frames) for segment in segments]
        self.left = self._places
        self._lengths: dict[Place, int] = {}  # of memory that is gathered, as far as that is known
        self._own: dict[Place, Tensor] = {}  # memory that begins with a frame
        self._sizes: list[Tensor] = []  # of own frames, in the order of places
        self._received: dict[Place, Tensor] = {}
        self._decoded: set[Place] = set()

    def encoded(self) -> Iterator[tuple[Place, Tensor]]:
        """All that is left to gather. Nothing comes, on both ranks, once the call must go plain."""
        if self._own:
            yield from self._padded(self.left)
            return
        if expected := self._codec.forecast.sizes:
            self._lengths = dict(zip(self._places, map(self._aligned, expected)))
        for batch in self._batches():
            own, sizes = self._codec.encode_ahead(batch, tell_outcome=bool(expected))
            self._own |= zip(batch, own)
            self._sizes.append(sizes)
            if not expected and not self._agree(batch, sizes):
                return
            yield from self._padded(batch)

    def decode_sum(self, place: Place, memory: Tensor) -> None:
        """Take the peer's frame of a place, which `memory` begins with, and write the sum of both to the output."""
        if place not in self._decoded:  # the output may be the memory of what is added
            self._codec.decode_sum(*place, [memory])
        self._received[place] = memory

    def check(self) -> None:
        """Wait until all of it is done, and find what was cut off and is `left`. Raises FrameError."""
        headers = [memory[:HEADER_BYTES] for memory in self._received.values()]
        sizes, *headers = self._codec.check(torch.cat(self._sizes), *headers)
        self.left = []
        if self._codec.bypass:
            return
        longest = dict(zip(self._places, sizes.tolist()))
        peer, capacity = 1 - self._transport.rank, self._codec.frame_capacity
        for place, header in zip(self._received, headers):
            theirs = frame_bytes(header.numpy(), peer, HEADER_BYTES, capacity)
            longest[place] = max(longest[place], theirs)
            if theirs <= self._lengths[place]:
                self._decoded.add(place)
            if longest[place] > self._lengths[place]:
                self.left.append(place)
                self._lengths[place] = self._aligned(longest[place])
        if not self.left:
            self._codec.forecast.learn(list(longest.values()))

    def _batches(self) -> Iterator[list[Place]]:
        """All places. Few frames are encoded together, so that the first ones travel early; small ones, many."""
        count = max(1, _TOGETHER // max(1, self._codec.layout.frame_elements))
        return (self._places[start : start + count] for start in range(0, len(self._places), count))

    def _agree(self, batch: list[Place], sizes: Tensor) -> bool:
        """Find the longest frame of each place, for which the host waits. Whether the call is still compressed."""
        longest = sizes.clone()
        with peer_errors("agreeing on the lengths of frames"):
            replace_by_largest(self._transport, longest, self._counters)
        self._lengths |= zip(batch, map(self._aligned, self._codec.seen(longest)))
        return not self._codec.bypass

    def _padded(self, places: list[Place]) -> list[tuple[Place, Tensor]]:
        return [(place, self._own[place][: self._lengths[place]]) for place in places]

    def _aligned(self, nbytes: int) -> int:
        return min(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, self._codec.frame_capacity)
