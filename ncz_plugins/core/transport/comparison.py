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
        self._world_size = world_size
        # The last digit to the base `world_size` tells which rank the maximum came from: the first one that has it.
        digit = world_size - 1 - rank
        highest = [number * world_size + digit for number in numbers.values()]
        negated = [-number * world_size + digit for number in numbers.values()]
        self.tensor = torch.tensor([*highest, *negated])

    def differing(self) -> dict[str, Extremes]:
        """The names of numbers that differ between ranks -> their extremes."""
        highest, negated = self.tensor.view(2, -1).tolist()
        n, found = self._world_size, {}
        for name, high, low in zip(self._names, highest, negated):
            if high // n != -(low // n):
                found[name] = Extremes(-(low // n), n - 1 - low % n, high // n, n - 1 - high % n)
        return found
