"""Codec that codes nothing and keeps time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ....core.codec.layout import Layout
from ....kernels.format import HEADER_BYTES
from .fleet import Fleet, Ranks, Times
from .sizes import CodeSizes
from .transport import TimedFrame


class TimedCodec:
    """Stand-in for `QuantizingCodec`, with the methods that schedules use.

    Attributes:
        layout: how the tensor is cut into segments and frames.
        frame_capacity: 0 bytes, as no frame is allocated.

    Args:
        fleet: clocks of the ranks.
        layout: see above.
        sizes: bits per value, and the coder.
    """

    frame_capacity = 0
    sums_to_output = True
    encodes_ahead = False  # the special case of two ranks on GPUs is timed like other numbers of ranks

    def __init__(self, fleet: Fleet, layout: Layout, sizes: CodeSizes):
        self.layout = layout
        self._fleet = fleet
        self._sizes = sizes
        self._in_batches = fleet.costs.kind == "gpu"
        self._lengths = np.array(layout.lengths)

    def encode_each(self, places: Iterable[tuple[Ranks | int, int]]) -> Iterator[TimedFrame]:
        """See `TensorCodec.encode_each`."""
        return self._in_turn((segment, index, []) for segment, index in places)

    def sum_each(self, segment: Ranks | int, frames: Iterable[list[TimedFrame]]) -> Iterator[TimedFrame]:
        """See `TensorCodec.sum_each`."""
        return self._in_turn((segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: Ranks | int, index: int, frame: TimedFrame) -> None:
        """See `TensorCodec.decode`."""
        self._fleet.decode(self._seconds("decode", frame.addends) * self._values(segment, index))

    def decode_sum(self, segment: Ranks | int, index: int, frames: list[TimedFrame]) -> None:
        """See `QuantizingCodec.decode_sum`."""
        # The rank's own codes are made once more, which takes no longer than half of encoding.
        seconds = self._seconds("decode", 1) * len(frames) + self._seconds("encode", 1) / 2
        self._fleet.decode(seconds * self._values(segment, index))

    def finish(self) -> None:
        """See `TensorCodec.finish`."""
        self._fleet.wait_for_decoder()

    def _in_turn(self, wanted: Iterable[tuple[Ranks | int, int, list[TimedFrame]]]) -> Iterator[TimedFrame]:
        """Frames that sum given frames and the rank's own values: one after another, or on a GPU all at once.

        Args:
            wanted: (segment, index of the frame, frames to add) of each frame.
        """
        if self._in_batches:
            yield from [self._sum(*each) for each in list(wanted)]
        else:
            yield from (self._sum(*each) for each in wanted)

    def _sum(self, segment: Ranks | int, index: int, frames: list[TimedFrame]) -> TimedFrame:
        values, addends = self._values(segment, index), 1 + sum(frame.addends for frame in frames)
        seconds = self._seconds("encode", addends) + sum(self._seconds("decode", frame.addends) for frame in frames)
        self._fleet.work(seconds * values)
        return TimedFrame(HEADER_BYTES + self._sizes.bits(addends) / 8 * values, addends)

    def _seconds(self, what: str, addends: int) -> float:
        costs = self._fleet.costs
        return 1e-12 * costs.coding_times * getattr(costs.coders[self._sizes.coder(addends)], what)

    def _values(self, segment: Ranks | int, index: int) -> Times | float:
        """Number of values in a frame. If one rank stands for all, every segment counts as the longest one."""
        size = self.layout.frame_elements
        if isinstance(segment, int):
            length = self._lengths.max()
        else:
            length = self._lengths[segment]
        return np.clip(length - index * size, 0, size).astype(float)
