"""The direct sums of two ranks with GPUs: each gathers the frames of the other one, at lengths that both know.

How long a frame is only the device knows. To ask it, and to tell the peer, takes as long as some kernels. So a call
expects frames as long as those of the calls before, see `Forecast`, and the host queues all of it without a wait:
frames are encoded into memory that is long enough for any, and as much of it is gathered as is expected to hold them.
Their real lengths stand in front of them. At the end the host sees which were cut off, and these are gathered once
more. Where nothing is expected, the ranks first agree on the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.format import FRONT_BYTES, HEADER_BYTES
from ..codec.tensor_codec import CODED_TOGETHER, QuantizingCodec
from ..errors import FrameError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, frame_bytes, peer_errors, replace_by_largest
from ..transport.forecast import Forecasts

_ALIGNMENT = 512  # of what is gathered, as of tensors on a GPU
_LENGTH_BYTES = 8  # of a frame's length, in front of it

Place = tuple[int, int]  # segment, and frame of it


class PaddedTransport(CollectiveTransport, Protocol):
    """What this schedule needs of a transport.

    Attributes:
        forecasts: how long frames are expected to be. It lasts as long as the ranks are connected.
    """

    forecasts: Forecasts


def all_reduce(transport: PaddedTransport, codec: QuantizingCodec, counters: Counters) -> None:
    """Decode the sum over two ranks of all segments to the output."""
    segments = range(len(codec.layout.lengths))
    places = [(segment, index) for index in range(codec.layout.frames) for segment in segments]
    _exchange(_PaddedFrames(transport, codec, counters, places, places), transport, counters)


def reduce_scatter(transport: PaddedTransport, codec: QuantizingCodec, counters: Counters) -> None:
    """Decode the sum over two ranks of this rank's segment to the output."""
    indices, rank = range(codec.layout.frames), transport.rank
    sends, sums = [(1 - rank, index) for index in indices], [(rank, index) for index in indices]
    _exchange(_PaddedFrames(transport, codec, counters, sends, sums), transport, counters)


def _exchange(frames: _PaddedFrames, transport: PaddedTransport, counters: Counters) -> None:
    while frames.left:
        gathers = []
        for number, memory in frames.encoded():
            gathered = memory.new_empty(2 * memory.numel())
            with span("send", memory.nbytes), peer_errors("exchanging frames"):
                gathers.append((number, gathered, transport.plain.all_gather_into_tensor(gathered, memory)))
            counters.wire_bytes += memory.nbytes
        for number, gathered, work in gathers:
            with peer_errors("exchanging frames"):
                work.wait()
            frames.decode_sum(number, gathered.chunk(2)[1 - transport.rank])
        frames.check()


class _PaddedFrames:
    """The frames of one call, each in memory that is equally long on both ranks. They are numbered as they travel.

    Args:
        sends, sums: for each number the place of what is sent, and of what comes in and is added to.

    Attributes:
        left: the numbers of those that are still to be gathered.
    """

    def __init__(
        self,
        transport: PaddedTransport,
        codec: QuantizingCodec,
        counters: Counters,
        sends: list[Place],
        sums: list[Place],
    ):
        self._transport = transport
        self._codec = codec
        self._counters = counters
        self._sends = sends
        self._sums = sums
        self._forecast = transport.forecasts.of(codec.kind)
        self.left: Sequence[int] = range(len(sends))
        self._lengths: dict[int, int] = {}  # how much of that is gathered, as far as that is known
        self._own: dict[int, Tensor] = {}  # memory: the length of a frame, and from FRONT_BYTES on the frame
        self._sizes: dict[int, Tensor] = {}  # the bytes of these frames, on the device
        self._received: dict[int, Tensor] = {}
        self._decoded: set[int] = set()

    def encoded(self) -> Iterator[tuple[int, Tensor]]:
        """All that is left to gather. Nothing comes, on both ranks, once the call must go plain."""
        if self._own:
            sizes = torch.cat([self._sizes[number] for number in self.left])
            yield from self._gathered(self.left, sizes)
            return
        if expected := self._forecast.sizes:
            self._lengths = dict(enumerate(map(_gathered_bytes, expected)))
        for batch in self._batches(2 if expected is None else len(self._sends)):
            memory = [self._codec.device.buffer(_gathered_bytes(self._codec.frame_capacity)) for _ in batch]
            frames = [each[FRONT_BYTES:] for each in memory]
            places = [self._sends[number] for number in batch]
            sizes = self._codec.encode_ahead(places, frames, tell_outcome=expected is not None)
            self._own |= zip(batch, memory)
            self._sizes |= zip(batch, sizes.split(1))
            if expected is None and not self._agree(batch, sizes):
                return
            yield from self._gathered(batch, sizes)

    def decode_sum(self, number: int, memory: Tensor) -> None:
        """Take what the peer sent, and write the sum of it and the own values to the output."""
        if number not in self._decoded:  # the output may be the memory of what is added
            self._codec.decode_sum(*self._sums[number], [memory[FRONT_BYTES:]], padded=True)
        self._received[number] = memory

    def check(self) -> None:
        """Wait until all of it is done, and find what was cut off and is `left`. Raises FrameError."""
        both = [*self._own.values(), *self._received.values()]  # of all; or nothing was received
        with span("wait", 0, self._counters):
            seen = self._codec.check(*(memory[: FRONT_BYTES + HEADER_BYTES] for memory in both))
        self.left = []
        if self._codec.bypass:
            return
        longest = []
        for number, (mine, peers) in enumerate(zip(seen, seen[len(self._own) :])):
            ours, theirs = _told(mine), self._length_of(peers)
            longest.append(max(ours, theirs))
            if _gathered_bytes(theirs) <= self._lengths[number]:
                self._decoded.add(number)
            if _gathered_bytes(longest[-1]) > self._lengths[number]:
                self.left.append(number)
                self._set_length(number, ours, longest[-1])
        if not self.left:
            self._forecast.learn(longest)

    def _length_of(self, beginning: Tensor) -> int:
        """Of a frame of the peer. Raises FrameError if the two that came with it differ, or are impossible."""
        peer, capacity = 1 - self._transport.rank, self._codec.frame_capacity
        theirs = frame_bytes(beginning[FRONT_BYTES:].numpy(), peer, HEADER_BYTES, capacity)
        if theirs != _told(beginning):
            raise FrameError(
                f"a frame of rank {peer} is damaged: its header says that it has {theirs} bytes, and the length that "
                f"came with it is {_told(beginning)}. Suspect the network or memory."
            )
        return theirs

    def _batches(self, most: int) -> Iterator[range]:
        """All numbers, in at most so many batches.

        Few frames are encoded together, so that the first ones travel early; small ones, many.
        """
        together = CODED_TOGETHER // max(1, self._codec.layout.frame_elements)
        every = range(len(self._sends))
        count = max(1, together, -(-len(every) // most))
        return (every[start : start + count] for start in every[::count])

    def _agree(self, batch: range, sizes: Tensor) -> bool:
        """Find the longest frame of each number, for which the host waits. Whether the call is still compressed."""
        longest = sizes.clone()
        with peer_errors("agreeing on the lengths of frames"):
            replace_by_largest(self._transport, longest, self._counters)
        with span("wait", 0, self._counters):
            seen = self._codec.seen(torch.cat([sizes, longest]))
        for number, ours, most in zip(batch, seen, seen[len(batch) :]):
            self._set_length(number, ours, most)
        return not self._codec.bypass

    def _set_length(self, number: int, ours: int, longest: int) -> None:
        """Let as much be gathered as the longest of both ranks' frames takes. Raises FrameError if that can't be."""
        if not ours <= longest <= self._codec.frame_capacity:
            raise FrameError(
                f"the longest frame of both ranks is said to have {longest} bytes; {ours} to "
                f"{self._codec.frame_capacity} are possible. Suspect the network or memory."
            )
        self._lengths[number] = _gathered_bytes(longest)

    def _gathered(self, numbers: Sequence[int], sizes: Tensor) -> list[tuple[int, Tensor]]:
        memory = [self._own[number][: self._lengths[number]] for number in numbers]
        self._codec.backend.pad_frames(memory, sizes)
        return list(zip(numbers, memory))


def _gathered_bytes(nbytes: int) -> int:
    """What is gathered of a frame of so many bytes."""
    return -(-(FRONT_BYTES + nbytes) // _ALIGNMENT) * _ALIGNMENT


def _told(beginning: Tensor) -> int:
    """The length that stands in front of a frame, in host memory."""
    return beginning[:_LENGTH_BYTES].view(torch.int64).item()
