"""Which gradients of an optimizer are reduced together: the same ones on all ranks, in an order that all of them know.

Ranks get their gradients in orders of their own. A plan sets one beforehand, so that what is complete can be reduced
while the backward pass goes on. It depends on nothing but the parameters: a run that is resumed has the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ..core.runtime.handle import Handle
from .buckets import Piece

ROUND_BYTES = 16 << 20  # few enough that most of a model is sent before its backward pass ends, and worth their latency


class Plan:
    """Rounds of neighbouring gradients, and how far they are in the step that is under way.

    Args:
        pieces: all that a step reduces.
        places: of parameters in their optimizer, by name. Backward passes come to them in about the reverse order, so
            that is the order of the rounds. Empty: all pieces are one round.

    Attributes:
        under_way: those of this step's rounds that were begun before its end.
        compressed: how many of this step's sums were compressed so far.
    """

    def __init__(self, pieces: Iterable[Piece], places: Mapping[str, int]):
        self._round_of: dict[tuple, int] = {}
        self._sizes: list[int] = []  # of rounds, in pieces
        filled = enough = ROUND_BYTES if places else math.inf
        for piece in sorted(pieces, key=lambda piece: (-places.get(piece.part.name, 0), piece.order)):
            if filled >= enough:
                self._sizes.append(0)
                filled = 0
            self._round_of[piece.key] = len(self._sizes) - 1
            self._sizes[-1] += 1
            filled += piece.tensor.nbytes
        self.begin()

    def begin(self) -> None:
        """Be ready for another step."""
        self._there: dict[int, dict[tuple, Piece]] = {}
        self._next = 0
        self.left = False
        self.under_way: list[Handle] = []
        self.compressed = 0

    def leave(self) -> None:
        """Nothing more is reduced before the end of this step."""
        self.left = True

    def wait(self) -> None:
        """Return once nothing is under way. Raises what went wrong first; what came after it was left."""
        try:
            for handle in self.under_way:
                handle.wait()
        finally:
            self.leave()  # what is under way still, after an error

    def covers(self, pieces: Iterable[Piece]) -> bool:
        """Whether it was made for these."""
        return {piece.key for piece in pieces} == self._round_of.keys()

    def take(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
        """Take note of pieces that are there; yield the rounds that can be reduced now: number, and pieces in order."""
        for piece in pieces:
            if piece.key in self._round_of:
                self._there.setdefault(self._round_of[piece.key], {})[piece.key] = piece
        while not self.left and self._next < len(self._sizes):
            complete = self._there.get(self._next, {})
            if len(complete) < self._sizes[self._next]:
                return
            self._next += 1
            del self._there[self._next - 1]
            yield self._next - 1, sorted(complete.values(), key=lambda piece: piece.order)

    def cut(self, pieces: Iterable[Piece]) -> list[tuple[int, list[Piece]]]:
        """Some of the pieces that it covers, by their rounds; those of a round stay in the order in which they are."""
        rounds: dict[int, list[Piece]] = {}
        for piece in pieces:
            rounds.setdefault(self._round_of[piece.key], []).append(piece)
        return sorted(rounds.items())
