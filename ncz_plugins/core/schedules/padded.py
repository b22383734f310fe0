"""Direct schedule for the sums of two ranks with GPUs, without a wait of the host for the lengths of frames.

Only the GPU knows how long a frame is. To read the length, and to tell the other rank, takes as long as some kernels.
So lengths are forecast from earlier calls, see `Forecast`:

1. The host queues everything without a wait. Frames are encoded into memory that any frame fits in, and an all-gather
   takes as many bytes of it as the frame is expected to have. The real length stands before the frame.
2. The host waits for the end, and looks which frames were longer than expected.
3. Frames that were cut off are gathered once more.

If there is no forecast, the ranks first agree on the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.format import FRONT_BYTES, HEADER_BYTES
from ..codec.gpu_codec import BATCH_ELEMENTS, GpuCodec
from ..codec.tensor_codec import FrameId
from ..errors import FrameError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import CollectiveTransport, frame_bytes, peer_errors, replace_by_largest

_GATHER_ALIGNMENT_BYTES = 512  # as of tensors on a GPU
_LENGTH_FIELD = Struct("<q")  # the length that stands before a frame
_EXCHANGING = peer_errors("exchanging frames")


class _ToGather(NamedTuple):
    """Frames of both ranks to gather.

    Attributes:
        number: theirs.
        memory: what this rank sends: uint8, [gathered bytes].
        gathered: what both ranks send: uint8, [2 * gathered bytes].
        theirs: the other rank's frame in it.
        fronts: the beginnings of what this rank and the other one send, see `_PaddedFrames._peer_length`.
    """

    number: int
    memory: Tensor
    gathered: Tensor
    theirs: Tensor
    fronts: tuple[Tensor, Tensor]


def all_reduce(transport: CollectiveTransport, codec: GpuCodec, counters: Counters) -> None:
    """Decode the sum over two ranks of all segments to the output."""
    segments = range(len(codec.layout.lengths))
    frame_ids = [(segment, index) for index in range(codec.layout.frames) for segment in segments]
    _run(_PaddedFrames(transport, codec, counters, frame_ids, frame_ids), transport, counters)


def reduce_scatter(transport: CollectiveTransport, codec: GpuCodec, counters: Counters) -> None:
    """Decode the sum over two ranks of this rank's segment to the output."""
    indices, rank = range(codec.layout.frames), transport.rank
    sends, sums = [(1 - rank, index) for index in indices], [(rank, index) for index in indices]
    _run(_PaddedFrames(transport, codec, counters, sends, sums), transport, counters)


def _run(frames: _PaddedFrames, transport: CollectiveTransport, counters: Counters) -> None:
    """Gather and add all frames, then once more those that were cut off."""
    while frames.left:
        # Queue all gathers before the first sum, so that encoding and transfer overlap.
        gathers = []
        for each in frames.encoded():
            with span("send", each.memory.nbytes), _EXCHANGING:
                gathers.append((each, transport.plain.all_gather_single(each.gathered, each.memory)))
            counters.wire_bytes += each.memory.nbytes
        for each, work in gathers:
            with _EXCHANGING:
                work.wait()
            frames.decode_sum(each)
        frames.check()


class _PaddedFrames:
    """Frames of one call, numbered in the order in which they are gathered.

    Args:
        sends: the frame that this rank sends, by number.
        sums: the frame that this rank adds to what the other rank sends, by number.

    Attributes:
        left: the numbers of the frames that are still to be gathered. The same on both ranks.
    """

    def __init__(
        self,
        transport: CollectiveTransport,
        codec: GpuCodec,
        counters: Counters,
        sends: list[FrameId],
        sums: list[FrameId],
    ):
        self._transport = transport
        self._codec = codec
        self._counters = counters
        self._sends = sends
        self._sums = sums
        self.left: Sequence[int] = range(len(sends))
        # By number. Memory holds the length of a frame, and from FRONT_BYTES on the frame.
        self._gathered_bytes: dict[int, int] = {}  # the same on both ranks; set once it is forecast or agreed
        self._own: list[Tensor] = []  # memory of frames that this rank sends
        self._own_sizes: list[Tensor] = []  # bytes of these frames, by batch: int64, [frames of it], on the GPU
        self._fronts: dict[int, tuple[Tensor, Tensor]] = {}  # of frames that were gathered
        self._summed: set[int] = set()  # frames that are left though the other rank's came whole: in the output

    def encoded(self) -> Iterator[_ToGather]:
        """Yield the frames that are left.

        Ends early, on both ranks, if it turns out that the call must go plain.
        """
        if self._own:
            sizes = torch.cat(self._own_sizes)
            sizes = torch.cat([sizes[number : number + 1] for number in self.left])
            yield from self._to_gather(self.left, [self._own[number] for number in self.left], sizes)
            return

        expected = self._codec.forecast.sizes
        if expected is None:
            for batch in self._batches(2):
                memory, sizes = self._encode(batch)
                self._keep(memory, sizes)
                if not self._agree(batch, sizes):
                    return
                yield from self._to_gather(batch, memory, sizes)
            return

        # The host decides nothing while a batch is encoded and padded, so the launches can be replayed. On the way to
        # the host, the outcome is ahead of the frames.
        self._gathered_bytes = dict(enumerate(map(padded_bytes, expected)))
        self._codec.tell_outcome()
        for batch in self._batches(len(self._sends)):

            def encode_and_pad(batch=batch) -> tuple:
                memory, sizes = self._encode(batch)
                return memory, sizes, self._to_gather(batch, memory, sizes)

            stage = "encode", batch.start
            memory, sizes, to_gather = self._codec.recorded.queue(stage, encode_and_pad, self._codec.noise)
            self._keep(memory, sizes)
            yield from to_gather

    def _encode(self, batch: range) -> tuple[list[Tensor], Tensor]:
        """Encode the frames of a batch that this rank sends. Returns their memory, and their bytes on the GPU."""
        memory = [self._codec.device.buffer(padded_bytes(self._codec.frame_capacity)) for _ in batch]
        frames = [each[FRONT_BYTES:] for each in memory]
        return memory, self._codec.encode_ahead([self._sends[number] for number in batch], frames)

    def _keep(self, memory: list[Tensor], sizes: Tensor) -> None:
        self._own += memory
        self._own_sizes.append(sizes)

    def decode_sum(self, frames: _ToGather) -> None:
        """Add this rank's values to a frame of the other rank, and write the sum to the output."""
        if frames.number not in self._summed:  # once only: the output may share memory with the values
            self._codec.decode_sum(*self._sums[frames.number], [frames.theirs], padded=True)
        self._fronts[frames.number] = frames.fronts

    def check(self) -> None:
        """Wait for the GPU. Afterwards `left` has the frames that were cut off. Raises FrameError."""
        with span("wait", 0, self._counters):
            fronts = self._codec.check(*chain.from_iterable(self._fronts.values()))
        self.left = []
        if self._codec.bypass:
            return
        self._codec.recorded.finish()

        # For each frame, compare the longer one of both ranks with the bytes that were gathered.
        longest = []
        for number, own_front, peer_front in zip(self._fronts, fronts[::2], fronts[1::2]):
            ours, theirs, gathered = _length_in(own_front), self._peer_length(peer_front), self._gathered_bytes[number]
            longest.append(max(ours, theirs))
            if padded_bytes(longest[-1]) > gathered:
                self.left.append(number)
                self._set_gathered_bytes(number, ours, longest[-1])
                if padded_bytes(theirs) <= gathered:
                    self._summed.add(number)
        if not self.left:
            self._codec.forecast.learn(longest)

    def _peer_length(self, front: np.ndarray) -> int:
        """The bytes of a frame of the other rank.

        Args:
            front: the length, and the frame's header: uint8, [FRONT_BYTES + HEADER_BYTES].

        Raises FrameError if the length and the header differ, or the length is impossible.
        """
        peer, capacity = 1 - self._transport.rank, self._codec.frame_capacity
        theirs, told = frame_bytes(front[FRONT_BYTES:], peer, HEADER_BYTES, capacity), _length_in(front)
        if theirs != told:
            raise FrameError(
                f"a frame of rank {peer} is damaged: its header says that it has {theirs} bytes, and the length that "
                f"came with it is {told}. Suspect the network or memory."
            )
        return theirs

    def _batches(self, most: int) -> Iterator[range]:
        """All numbers, in at most `most` batches of frames that are encoded together.

        Batches are as small as `most` and BATCH_ELEMENTS allow: the first frames should travel early, but small frames
        should share a launch.
        """
        together = BATCH_ELEMENTS // max(1, self._codec.layout.frame_elements)
        every = range(len(self._sends))
        count = max(1, together, -(-len(every) // most))
        return (every[start : start + count] for start in every[::count])

    def _agree(self, batch: range, sizes: Tensor) -> bool:
        """Agree on the longer frame of both ranks for each number. The host waits.

        Args:
            sizes: bytes of this rank's frames: int64, [len(batch)], on the GPU.

        Returns False if the call must go plain.
        """
        longest = sizes.clone()
        with peer_errors("agreeing on the lengths of frames"):
            replace_by_largest(self._transport, longest, self._counters)
        with span("wait", 0, self._counters):
            on_host = self._codec.sizes_on_host(torch.cat([sizes, longest]))
        for number, ours, most in zip(batch, on_host, on_host[len(batch) :]):
            self._set_gathered_bytes(number, ours, most)
        return not self._codec.bypass

    def _set_gathered_bytes(self, number: int, ours: int, longest: int) -> None:
        """Gather the bytes that the longer frame of both ranks takes. Raises FrameError if `longest` is impossible."""
        if not ours <= longest <= self._codec.frame_capacity:
            raise FrameError(
                f"the longest frame of both ranks is said to have {longest} bytes; {ours} to "
                f"{self._codec.frame_capacity} are possible. Suspect the network or memory."
            )
        self._gathered_bytes[number] = padded_bytes(longest)

    def _to_gather(self, numbers: Sequence[int], memory: list[Tensor], sizes: Tensor) -> list[_ToGather]:
        """Write the lengths before the frames in `memory`. Returns what `encoded` yields."""
        memory = [each[: self._gathered_bytes[number]] for number, each in zip(numbers, memory)]
        self._codec.backend.pad_frames(memory, sizes)
        # All views are made here, as each takes microseconds: they are kept with what is recorded.
        front, to_gather = FRONT_BYTES + HEADER_BYTES, []
        for number, own in zip(numbers, memory):
            gathered = self._codec.device.buffer(2 * own.numel())
            theirs = gathered.chunk(2)[1 - self._transport.rank]
            fronts = own[:front], theirs[:front]
            to_gather.append(_ToGather(number, own, gathered, theirs[FRONT_BYTES:], fronts))
        return to_gather


def padded_bytes(nbytes: int) -> int:
    """The bytes to gather for a frame of `nbytes` bytes: with the length before it, and aligned."""
    return -(-(FRONT_BYTES + nbytes) // _GATHER_ALIGNMENT_BYTES) * _GATHER_ALIGNMENT_BYTES


def _length_in(front: np.ndarray) -> int:
    """The length that stands before a frame."""
    return _LENGTH_FIELD.unpack_from(front)[0]
