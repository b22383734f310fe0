"""Codec that codes nothing and keeps time, and what coding takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ....core.codec.layout import Layout
from ....kernels.format import HEADER_BYTES
from .costs import Costs
from .fleet import Fleet, Ranks, Times
from .sizes import CodeSizes
from .transport import TimedFrame


class CodingTimes:
    """Seconds to code a value, and bits of its code, by the number of ranks whose codes are added up: `addends`.

    Numbers of addends are integers, or arrays of them, from 1 to `ranks`.
    """

    def __init__(self, costs: Costs, sizes: CodeSizes, ranks: int):
        numbers = range(1, ranks + 1)
        coders = [costs.coders[sizes.coder(addends)] for addends in numbers]
        seconds = 1e-12 * costs.coding_times
        self._bits = np.array([np.nan, *map(sizes.bits, numbers)])
        self._encode = np.array([np.nan, *(seconds * each.encode for each in coders)])
        self._decode = np.array([np.nan, *(seconds * each.decode for each in coders)])

    def bits(self, addends: np.ndarray | int) -> Times | float:
        return self._bits[addends]

    def decode(self, addends: np.ndarray | int) -> Times | float:
        return self._decode[addends]

    def sum(self, addends: np.ndarray | int, added: Sequence[np.ndarray | int]) -> Times | float:
        """Decode frames of `added` addends each, and encode their sum with the rank's own value."""
        return self._encode[addends] + sum([self._decode[each] for each in added])

    def decode_sum(self, frames: int) -> float:
        """Decode frames of single ranks, and the rank's own codes, which are made once more."""
        return self._decode[1] * frames + self._encode[1] / 2  # it takes no longer than half of encoding


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
        self._times = CodingTimes(fleet.costs, sizes, fleet.world_size)
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
        self._fleet.decode(self._times.decode(frame.addends) * self._values(segment, index))

    def decode_sum(self, segment: Ranks | int, index: int, frames: list[TimedFrame]) -> None:
        """See `QuantizingCodec.decode_sum`."""
        self._fleet.decode(self._times.decode_sum(len(frames)) * self._values(segment, index))

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
        added = [frame.addends for frame in frames]
        values, addends = self._values(segment, index), 1 + sum(added)
        self._fleet.work(self._times.sum(addends, added) * values)
        return TimedFrame(HEADER_BYTES + self._times.bits(addends) / 8 * values, addends)

    def _values(self, segment: Ranks | int, index: int) -> Times | float:
        """Number of values in a frame. If one rank stands for all, every segment counts as the longest one."""
        size = self.layout.frame_elements
        if isinstance(segment, int):
            length = self._lengths.max()
        else:
            length = self._lengths[segment]
        return np.clip(length - index * size, 0, size).astype(float)
