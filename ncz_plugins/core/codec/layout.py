"""Layout of a flat tensor: one segment for each rank, and each segment cut into frames.

Layouts never change a result. Segments and frames begin at chunks, and a chunk is coded independently of all others.
Each `format.SCALE_BLOCK` elements have their own quantization step, counted from the start of a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from torch import Tensor

from ...kernels.format import CHUNK, SCALE_BLOCK, blocks_of, chunks_of

_MIN_FRAME_CHUNKS = 64  # 1 MiB of float32: smaller frames cost more as messages than overlap saves
_MIN_FRAMES_OF_SEGMENT = 2  # so that one is coded while another one travels


@dataclass(frozen=True)
class Layout:
    """Segments and frames of one tensor. All ranks derive the same layout from sizes that they agree on.

    Attributes:
        lengths: elements of each segment, 0 allowed; they add up to the tensor's elements.
        frame_elements: elements of a full frame, a multiple of CHUNK.
    """

    lengths: tuple[int, ...]
    frame_elements: int

    @classmethod
    @lru_cache(maxsize=256)  # training repeats its calls
    def split(cls, numel: int, segments: int, frame_elements: int, block: int, overlap: bool = True) -> Layout:
        """Cut `numel` elements into segments of nearly equal size.

        Segments start at multiples of CHUNK and of `block`, so blocks that share a scale are the same for any number of
        segments. The last segments of a small tensor may be empty.

        Args:
            frame_elements: elements of a full frame, at most.
            block: elements that share a scale; 0: the whole tensor.
            overlap: see `of`.
        """
        unit = math.lcm(block or CHUNK, CHUNK)
        length = -(-numel // (segments * unit)) * unit
        starts = [min(i * length, numel) for i in range(segments + 1)]
        return cls.of([b - a for a, b in zip(starts, starts[1:])], frame_elements, overlap)

    @classmethod
    def of(cls, lengths: list[int], frame_elements: int, overlap: bool = True) -> Layout:
        """Segments of the given lengths.

        Args:
            frame_elements: elements of a full frame, at most.
            overlap: shorten frames so that a segment has at least 2, and one is coded while the other one travels.
        """
        longest = chunks_of(max(lengths))
        longest_frame = max(_MIN_FRAME_CHUNKS, -(-longest // _MIN_FRAMES_OF_SEGMENT) if overlap else longest)
        return cls(tuple(lengths), min(chunks_of(frame_elements), longest_frame) * CHUNK)

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of each segment, then the number of all elements."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def _first_steps(self) -> list[int]:
        """The first quantization step of each segment, then the number of all steps."""
        return [0, *accumulate(map(blocks_of, self.lengths))]

    @property
    def numel(self) -> int:
        return self._starts[-1]

    @cached_property
    def frames(self) -> int:
        """Frames of each segment: the number that the longest needs. The last frames of shorter segments are empty."""
        return max(1, -(-max(self.lengths) // self.frame_elements))

    @property
    def steps(self) -> int:
        """Quantization steps of the tensor: one for each SCALE_BLOCK elements of a segment."""
        return self._first_steps[-1]

    def segment(self, segment: int) -> slice:
        """Elements of one segment, as an index into the tensor."""
        return slice(self._starts[segment], self._starts[segment + 1])

    def for_segments(self, segments: range) -> Layout:
        """The layout of neighbouring segments only."""
        return Layout(self.lengths[segments.start : segments.stop], self.frame_elements)

    def elements(self, segments: range) -> slice:
        """Elements of neighbouring segments, as an index into the tensor."""
        return slice(self._starts[segments.start], self._starts[segments.stop])

    def steps_of(self, segments: range) -> slice:
        """Quantization steps of neighbouring segments, as an index into the steps of the tensor."""
        return slice(self._first_steps[segments.start], self._first_steps[segments.stop])

    def frame(self, segment: int, index: int) -> slice:
        """Elements of one frame, as an index into the tensor."""
        start, stop = self._starts[segment], self._starts[segment + 1]
        first = start + index * self.frame_elements
        return slice(min(first, stop), min(first + self.frame_elements, stop))

    def frame_steps(self, segment: int, index: int) -> slice:
        """Quantization steps of one frame, as an index into the steps of the tensor."""
        start, stop = self._first_steps[segment], self._first_steps[segment + 1]
        steps_of_frame = self.frame_elements // SCALE_BLOCK
        first = start + index * steps_of_frame
        return slice(min(first, stop), min(first + steps_of_frame, stop))

    def block_lengths(self, block: int) -> np.ndarray:
        """Elements of each block that shares a scale: int64, [blocks]. Each segment begins a new block.

        Args:
            block: elements of a full block, a multiple of SCALE_BLOCK; 0: the whole tensor is one block.
        """
        if block == 0:
            return np.array([self.numel])
        return np.concatenate([np.minimum(block, n - np.arange(0, n, block)) for n in self.lengths])

    def steps_per_block(self, block: int) -> np.ndarray:
        """Quantization steps of each block: int64, [blocks]."""
        if block == 0:
            return np.array([self.steps])
        return -(-self.block_lengths(block) // SCALE_BLOCK)


@dataclass(frozen=True)
class Window:
    """Flat tensor that holds some elements of a layout, beginning with element `start`.

    Attributes:
        data: the elements, [n].
        start: number of the first one in the layout.
    """

    data: Tensor
    start: int = 0

    def __getitem__(self, elements: slice) -> Tensor:
        """A view of some elements, by their numbers in the layout."""
        return self.data[elements.start - self.start : elements.stop - self.start]

    def counted_from(self, element: int) -> Window:
        """The same memory, for a layout whose element 0 is this layout's `element`."""
        return Window(self.data, self.start - element)
