"""Whether all ranks hold the same numbers, and which ranks don't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Extremes(NamedTuple):
    """The lowest and the highest of the ranks' numbers, and the first rank that has each."""

    lowest: int
    lowest_rank: int
    highest: int
    highest_rank: int


class RankComparison:
    """Compares numbers by an element-wise maximum over ranks, the one thing that every transport can find.

    Args:
        numbers: what each number stands for -> this rank's number. Its magnitude times `world_size` fits in 63 bits.
        rank: this rank, from 0 to `world_size` - 1.

    Attributes:
        tensor: int64, two elements for each number. Replace it by its element-wise maximum over ranks, then call
            `differing`.
    """

    def __init__(self, numbers: Mapping[str, int], rank: int, world_size: int):
        self._names = list(numbers)
        self._rank = rank
        self._world_size = world_size
        # The last digit to the base `world_size` tells which rank the maximum came from: the first one that has it.
        own, first = world_size - 1 - rank, world_size - 1
        scaled = [number * world_size for number in numbers.values()]
        scaled += [-number for number in scaled]
        self.tensor = torch.empty(len(scaled), dtype=torch.int64)
        self.tensor.numpy()[:] = [number + own for number in scaled]  # torch.tensor takes several times as long
        self._if_all_agree = [number + first for number in scaled]

    def told_by(self, rank: int) -> bytes:
        """What `tensor` holds at first on another rank, if that has the same numbers. For use before it is replaced."""
        return (self.tensor.numpy() + (self._rank - rank)).tobytes()

    def differing(self) -> dict[str, Extremes]:
        """The names of numbers that differ between ranks -> their extremes."""
        found = self.tensor.tolist()
        if found == self._if_all_agree:
            return {}
        n, count = self._world_size, len(self._names)
        return {
            name: Extremes(-(low // n), n - 1 - low % n, high // n, n - 1 - high % n)
            for name, high, low in zip(self._names, found[:count], found[count:])
            if high // n != -(low // n)
        }
