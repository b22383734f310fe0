"""Comparison of numbers between ranks: which numbers differ, and on which ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor


class Extremes(NamedTuple):
    """Lowest and highest of the ranks' numbers, and the first rank that has each."""

    lowest: int
    lowest_rank: int
    highest: int
    highest_rank: int


class RankComparison:
    """Comparison of the same named numbers on all ranks, in one of two ways:

    - Each rank sends `told` to all others, and passes what it receives to `hear`.
    - The ranks replace `tensor` by its maximum over ranks. Every transport can do that, but with torch it takes longer.

    Then `differing` has the result.

    Args:
        numbers: name -> this rank's number. Its magnitude times `world_size` must fit in 63 bits.
        rank: this rank, from 0 to `world_size` - 1.

    Attributes:
        told: this rank's numbers as bytes. Ranks with equal numbers have equal bytes.
    """

    def __init__(self, numbers: Mapping[str, int], rank: int, world_size: int):
        self._numbers = numbers
        self._rank = rank
        self._world_size = world_size
        self.told = bytes_of_numbers(numbers.values())
        self._heard: list[tuple[int, bytes]] = []  # other ranks and their `told`
        self._tensor: Tensor | None = None

    def hear(self, heard: list[tuple[int, bytes]]) -> None:
        """Take other ranks and the `told` of each. They have the length of this rank's."""
        self._heard += heard

    @property
    def tensor(self) -> Tensor:
        """This rank's numbers: int64, [2 * numbers]. Replace it by its element-wise maximum over ranks."""
        if self._tensor is None:
            # In base `world_size`, the last digit of a maximum tells the first rank that has it.
            n, digit = self._world_size, self._world_size - 1 - self._rank
            numbers = self._numbers.values()
            signed = [*numbers, *(-number for number in numbers)]
            self._tensor = torch.tensor([number * n + digit for number in signed], dtype=torch.int64, device="cpu")
        return self._tensor

    @tensor.setter
    def tensor(self, highest: Tensor) -> None:
        self._tensor = highest

    def differing(self) -> dict[str, Extremes]:
        """Name -> extremes, for each number that differs between ranks. Empty if all are equal."""
        if self._tensor is not None:
            found = self._extremes_in_tensor()
        elif {told for _, told in self._heard} <= {self.told}:
            return {}  # the usual case
        else:
            found = self._extremes_heard()
        return {name: ends for name, ends in found.items() if ends.lowest != ends.highest}

    def _extremes_heard(self) -> dict[str, Extremes]:
        ranks, told = zip(*sorted([(self._rank, self.told), *self._heard]))
        found = {}
        for name, *numbers in zip(self._numbers, *map(_format(len(self._numbers)).unpack, told)):
            lowest, highest = min(numbers), max(numbers)
            found[name] = Extremes(lowest, ranks[numbers.index(lowest)], highest, ranks[numbers.index(highest)])
        return found

    def _extremes_in_tensor(self) -> dict[str, Extremes]:
        n, highest = self._world_size, self._tensor.tolist()
        return {
            name: Extremes(-(low // n), n - 1 - low % n, high // n, n - 1 - high % n)
            for name, high, low in zip(self._numbers, highest, highest[len(self._numbers) :])
        }


def place_of(value: object, values: Sequence) -> int:
    """Index of the first of `values` that equals `value`; len(values) if none does."""
    for at, each in enumerate(values):
        if each is value:  # the usual case, and faster than torch's `==`
            return at
    return next((at for at, each in enumerate(values) if each == value), len(values))


def bytes_of_numbers(numbers: Collection[int]) -> bytes:
    """Numbers as bytes: 64 bits each, the low ones first."""
    return _format(len(numbers)).pack(*numbers)


@lru_cache
def _format(count: int) -> Struct:
    """The format of `count` numbers as bytes."""
    return Struct(f"<{count}q")
