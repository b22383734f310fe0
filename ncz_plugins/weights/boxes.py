"""Boxes: ranges of a tensor's elements, one range in each dimension. A part of a tensor is a box, and so is a frame."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ..kernels.format import CHUNK

if TYPE_CHECKING:
    from ..kernels.arrays import Array

FRAME_ELEMENTS = 256 * CHUNK  # most elements of a frame


class Box(NamedTuple):
    """A box of elements.

    Attributes:
        offsets: index of the first element, in each dimension of the whole tensor.
        sizes: number of elements in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, sizes: tuple[int, ...]) -> Box:
        """All elements of a tensor."""
        return cls((0,) * len(sizes), tuple(sizes))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that are in both boxes; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes)]
        sizes = tuple(end - first for first, end in zip(offsets, ends))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def of(self, array: Array, origin: tuple[int, ...]) -> Array:
        """The view of this box in an array whose first element has the index `origin`."""
        if self.sizes == tuple(array.shape):
            return array
        begins = [offset - first for offset, first in zip(self.offsets, origin)]
        return array[tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes))]


# A box is cut into frames without a table: whoever knows its sizes knows its frames. As many of the last dimensions as
# fit into a frame stay whole. The dimension in front of them is cut into the fewest ranges that fit, all equally long
# but a shorter last one. Frames never extend over more than one index of the dimensions before that one.


def frame_count(sizes: tuple[int, ...]) -> int:
    """Number of frames of a box, without listing them."""
    if not all(sizes):
        return 0
    cut, length = _cut(sizes)
    return math.prod(sizes[:cut]) * -(-sizes[cut] // length) if sizes else 1


def frames_of(box: Box) -> Iterator[Box]:
    """The boxes of the frames of a box, in the order of their first elements."""
    if box.numel <= FRAME_ELEMENTS:
        yield from [box] if box.numel else []
        return
    cut, length = _cut(box.sizes)
    rest = box.sizes[cut + 1 :]
    for index in product(*map(range, box.sizes[:cut])):
        for first in range(0, box.sizes[cut], length):
            inside = (*index, first, *(0 for _ in rest))
            sizes = (*(1 for _ in index), min(length, box.sizes[cut] - first), *rest)
            yield Box(tuple(a + b for a, b in zip(box.offsets, inside)), sizes)


def _cut(sizes: tuple[int, ...]) -> tuple[int, int]:
    """The dimension that is cut, and the length of its ranges. No size is 0."""
    cut, behind = len(sizes) - 1, 1  # `behind`: elements of the dimensions behind the cut
    while cut > 0 and behind * sizes[cut] <= FRAME_ELEMENTS:
        behind *= sizes[cut]
        cut -= 1
    if not sizes:
        return 0, 1
    ranges = -(-sizes[cut] // (FRAME_ELEMENTS // behind))
    return cut, -(-sizes[cut] // ranges)
