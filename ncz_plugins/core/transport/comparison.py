"""Whether all ranks hold the same numbers, and which ranks don't."""

from __future__ import annotations

import struct
from collections.abc import Mapping
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
    """Compares numbers by an element-wise maximum over ranks, the one thing that every transport can find.

    Ranks that hear of each other's numbers directly use `told_by` and `hear`, and no tensor: for so few numbers torch
    takes longer than they are on their way.

    Args:
        numbers: what each number stands for -> this rank's number. Its magnitude times `world_size` fits in 63 bits.
        rank: this rank, from 0 to `world_size` - 1.

    Attributes:
        nbytes: of what a rank tells.
    """

    def __init__(self, numbers: Mapping[str, int], rank: int, world_size: int):
        self._names = list(numbers)
        self._rank = rank
        self._world_size = world_size
        # The last digit to the base `world_size` tells which rank the maximum came from: the first one that has it.
        self._scaled = [number * world_size for number in numbers.values()]
        self._scaled += [-number for number in self._scaled]
        self._format = f"<{len(self._scaled)}q"
        self.nbytes = struct.calcsize(self._format)
        self._tensor: Tensor | None = None
        self._heard: list[tuple[int, bytes]] = []  # ranks and what they told

    def told_by(self, rank: int) -> bytes:
        """What a rank tells the others, if it has the same numbers as this one."""
        return struct.pack(self._format, *self._with_digit_of(rank))

    def hear(self, rank: int, told: bytes) -> None:
        """Take note of what another rank has told."""
        self._heard.append((rank, told))

    @property
    def tensor(self) -> Tensor:
        """int64, two elements for each number. Replace it by its element-wise maximum over ranks."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(bytearray(self.told_by(self._rank)), dtype=torch.int64)
        return self._tensor

    @tensor.setter
    def tensor(self, highest: Tensor) -> None:
        self._tensor = highest

    def differing(self) -> dict[str, Extremes]:
        """The names of numbers that differ between ranks -> their extremes."""
        if self._tensor is not None:
            highest = self._tensor.tolist()
        elif all(told == self.told_by(rank) for rank, told in self._heard):
            return {}  # as nearly always
        else:
            others = [struct.unpack(self._format, told) for _, told in self._heard]
            highest = list(map(max, zip(self._with_digit_of(self._rank), *others)))
        n, count = self._world_size, len(self._names)
        return {
            name: Extremes(-(low // n), n - 1 - low % n, high // n, n - 1 - high % n)
            for name, high, low in zip(self._names, highest[:count], highest[count:])
            if high // n != -(low // n)
        }

    def _with_digit_of(self, rank: int) -> list[int]:
        digit = self._world_size - 1 - rank
        return [number + digit for number in self._scaled]
