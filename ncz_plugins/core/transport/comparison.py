"""Whether all ranks hold the same numbers, and which ranks don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor


class Extremes(NamedTuple):
    """The lowest and the highest of the ranks' numbers, and the first rank that has each."""

    lowest: int
    lowest_rank: int
    highest: int
    highest_rank: int


class RankComparison:
    """Compares numbers between ranks, each of which tells all others its own.

    Where they can't, the maximum over ranks of `tensor` says as much: every transport can find one. That takes torch
    longer than so few numbers are on their way.

    Args:
        numbers: what each number stands for -> this rank's number. Its magnitude times `world_size` fits in 63 bits.
        rank: this rank, from 0 to `world_size` - 1.

    Attributes:
        told: what this rank tells the others. They tell the same if they have the same numbers.
    """

    def __init__(self, numbers: Mapping[str, int], rank: int, world_size: int):
        self._numbers = numbers
        self._rank = rank
        self._world_size = world_size
        self._format = _format(len(numbers))
        self.told = self._format.pack(*numbers.values())
        self._heard: list[tuple[int, bytes]] = []  # what other ranks have told
        self._tensor: Tensor | None = None

    def hear(self, rank: int, told: bytes) -> None:
        """Take note of what another rank has told, which has as many bytes as `told`."""
        self._heard.append((rank, told))

    @property
    def tensor(self) -> Tensor:
        """int64, two elements for each number. Replace it by its element-wise maximum over ranks."""
        if self._tensor is None:
            # The last digit to the base `world_size` tells which rank the maximum came from: the first one that has it.
            n, digit = self._world_size, self._world_size - 1 - self._rank
            numbers = self._numbers.values()
            signed = [*numbers, *(-number for number in numbers)]
            self._tensor = torch.tensor([number * n + digit for number in signed], dtype=torch.int64, device="cpu")
        return self._tensor

    @tensor.setter
    def tensor(self, highest: Tensor) -> None:
        self._tensor = highest

    def differing(self) -> dict[str, Extremes]:
        """The names of numbers that differ between ranks -> their extremes."""
        if self._tensor is not None:
            found = self._in_tensor()
        elif {told for _, told in self._heard} <= {self.told}:
            return {}  # as nearly always
        else:
            found = self._in_words()
        return {name: ends for name, ends in found.items() if ends.lowest != ends.highest}

    def _in_words(self) -> dict[str, Extremes]:
        ranks, told = zip(*sorted([(self._rank, self.told), *self._heard]))
        found = {}
        for name, *numbers in zip(self._numbers, *map(self._format.unpack, told)):
            lowest, highest = min(numbers), max(numbers)
            found[name] = Extremes(lowest, ranks[numbers.index(lowest)], highest, ranks[numbers.index(highest)])
        return found

    def _in_tensor(self) -> dict[str, Extremes]:
        n, highest = self._world_size, self._tensor.tolist()
        return {
            name: Extremes(-(low // n), n - 1 - low % n, high // n, n - 1 - high % n)
            for name, high, low in zip(self._numbers, highest, highest[len(self._numbers) :])
        }


def place_of(value: object, values: Sequence) -> int:
    """The place of the first that is or equals `value`; behind all of them if none does."""
    for at, each in enumerate(values):
        if each is value:  # as nearly always, and to ask torch whether two of its things are equal takes longer
            return at
    return next((at for at, each in enumerate(values) if each == value), len(values))


@lru_cache
def _format(count: int) -> Struct:
    """Of so many numbers as bytes."""
    return Struct(f"<{count}q")
