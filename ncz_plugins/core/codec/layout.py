"""How a flat tensor is cut: into one segment per rank, and each segment into frames.

The cuts never change a result: both fall on the boundaries of chunks, which are coded by themselves, and every
`format.SCALE_BLOCK` elements of a chunk have a quantization step of their own, counted from the start of a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from torch import Tensor

from ...kernels.format import CHUNK, SCALE_BLOCK, blocks_of, chunks_of

_MIN_FRAME_CHUNKS = 64  # 1 MiB of float32: below this the cost per message outweighs the overlap
_FRAMES_TO_OVERLAP = 2  # frames a segment should have, so that coding and transfer overlap


@dataclass(frozen=True)
class Layout:
    """The cuts of one tensor. All ranks derive the same one from sizes that they agree on.

    Attributes:
        lengths: elements of each segment; their sum is the tensor's size. Zero is allowed.
        frame_elements: elements of a full frame, a multiple of CHUNK.
    """

    lengths: tuple[int, ...]
    frame_elements: int

    @classmethod
    @lru_cache(maxsize=256)  # most calls are repeated
    def split(cls, numel: int, segments: int, frame_elements: int, block: int, overlap: bool = True) -> Layout:
        """Segments of nearly equal size that start on multiples of CHUNK and of `block`.

        So the blocks that share a scale are the same for every number of segments; the last
        segments of a small tensor may be empty.
        """
        unit = math.lcm(block or CHUNK, CHUNK)
        length = -(-numel // (segments * unit)) * unit
        starts = [min(i * length, numel) for i in range(segments + 1)]
        return cls.of([b - a for a, b in zip(starts, starts[1:])], frame_elements, overlap)

    @classmethod
    def of(cls, lengths: list[int], frame_elements: int, overlap: bool = True) -> Layout:
        """Segments of the given lengths.

        Args:
            overlap: whether frames are shortened where a segment would fill too few to overlap coding and transfer.
        """
        longest = chunks_of(max(lengths))
        enough = max(_MIN_FRAME_CHUNKS, -(-longest // _FRAMES_TO_OVERLAP) if overlap else longest)
        return cls(tuple(lengths), min(chunks_of(frame_elements), enough) * CHUNK)

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of each segment, and the number of all."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def _first_steps(self) -> list[int]:
        """The first step of each segment, and the number of all."""
        return [0, *accumulate(map(blocks_of, self.lengths))]

    @property
    def numel(self) -> int:
        return self._starts[-1]

    @cached_property
    def frames(self) -> int:
        """Frames of every segment: as many as the longest needs, so in shorter ones the last are empty."""
        return max(1, -(-max(self.lengths) // self.frame_elements))

    @property
    def steps(self) -> int:
        """Quantization steps of the whole tensor: one for SCALE_BLOCK elements, counted afresh in every segment."""
        return self._first_steps[-1]

    def segment(self, segment: int) -> slice:
        """Elements of one segment."""
        return slice(self._starts[segment], self._starts[segment + 1])

    def part(self, segments: range) -> Layout:
        """The layout of some neighbouring segments by themselves."""
        return Layout(self.lengths[segments.start : segments.stop], self.frame_elements)

    def elements(self, segments: range) -> slice:
        """Elements of some neighbouring segments."""
        return slice(self._starts[segments.start], self._starts[segments.stop])

    def steps_of(self, segments: range) -> slice:
        """Quantization steps of some neighbouring segments, as an index into the steps of the tensor."""
        return slice(self._first_steps[segments.start], self._first_steps[segments.stop])

    def frame(self, segment: int, index: int) -> slice:
        """Elements of one frame."""
        start, stop = self._starts[segment], self._starts[segment + 1]
        first = start + index * self.frame_elements
        return slice(min(first, stop), min(first + self.frame_elements, stop))

    def frame_steps(self, segment: int, index: int) -> slice:
        """Quantization steps of one frame, as an index into the steps of the tensor."""
        start, stop = self._first_steps[segment], self._first_steps[segment + 1]
        of_frame = self.frame_elements // SCALE_BLOCK
        first = start + index * of_frame
        return slice(min(first, stop), min(first + of_frame, stop))

    def block_lengths(self, block: int) -> np.ndarray:
        """Elements of each block that shares a scale, [blocks]; blocks start afresh in every segment.

        `block` is a multiple of SCALE_BLOCK, or 0 for one block that is the whole tensor.
        """
        if block == 0:
            return np.array([self.numel])
        return np.concatenate([np.minimum(block, n - np.arange(0, n, block)) for n in self.lengths])

    def steps_per_block(self, block: int) -> np.ndarray:
        """How many steps are those of each block, [blocks]."""
        if block == 0:
            return np.array([self.steps])
        return -(-self.block_lengths(block) // SCALE_BLOCK)


@dataclass(frozen=True)
class Window:
    """The part of a layout's elements that one flat tensor holds: those from `start` on."""

    data: Tensor
    start: int = 0

    def __getitem__(self, elements: slice) -> Tensor:
        """A view of some elements, numbered as the layout does."""
        return self.data[elements.start - self.start : elements.stop - self.start]

    def counted_from(self, element: int) -> Window:
        """The same memory where the layout's count begins at what was `element`."""
        return Window(self.data, self.start - element)
