"""How long the frames of a call will be, by those of calls of the same kind before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ALIKE = 9 / 8  # how much more bytes the larger of two calls may have for a third one to be expected like them
_MARGIN = 64  # a part of a frame that is added to what is expected: calls of the same data differ by less than 1 %


class Forecast:
    """The bytes of each frame of the next call of a kind, as all ranks expect them: they saw the same frames before."""

    def __init__(self):
        self._calls: deque[Sequence[int]] = deque(maxlen=2)

    def learn(self, sizes: Sequence[int]) -> None:
        """Take note of a call. Each of `sizes` is that of the longest of the ranks' frames."""
        self._calls.append(sizes)

    @property
    def sizes(self) -> list[int] | None:
        """What each frame will hardly exceed; None where too few calls were seen, or they differed."""
        if len(self._calls) < 2:
            return None
        fewer, more = sorted(map(sum, self._calls))
        if more > _ALIKE * fewer:
            return None
        return [longest + longest // _MARGIN for longest in map(max, *self._calls)]
