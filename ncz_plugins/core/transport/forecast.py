"""How long the frames of a call will be, by those of calls of the same kind before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_CALLS = 4  # that must have been alike
_ALIKE = 32  # a part of a frame by which it may differ in these calls
_MARGIN = 64  # a part of a frame that is added to what is expected: calls of the same data differ by less than 1 %
_LITTLE = 512  # bytes by which frames may differ besides
_MOST_KINDS = 256


class Forecast:
    """The bytes of each frame of the next call of a kind, as both ranks expect them, who saw the same frames before."""

    def __init__(self):
        self._calls: deque[Sequence[int]] = deque(maxlen=_CALLS)

    def learn(self, sizes: Sequence[int]) -> None:
        """Take note of a call. Each of `sizes` is that of the longest of the ranks' frames."""
        self._calls.append(sizes)

    @property
    def sizes(self) -> list[int] | None:
        """What each frame will hardly exceed; None where too few calls were seen, or they differed."""
        if len(self._calls) < _CALLS:
            return None
        frames = [(min(sizes), max(sizes)) for sizes in zip(*self._calls)]
        if any(longest > shortest + shortest // _ALIKE + _LITTLE for shortest, longest in frames):
            return None
        return [longest + longest // _MARGIN for _, longest in frames]


class Forecasts:
    """One for each kind of calls, of the kinds that were used last."""

    def __init__(self):
        self._kinds: dict[str, Forecast] = {}

    def of(self, kind: str) -> Forecast:
        forecast = self._kinds.pop(kind, None) or Forecast()
        self._kinds[kind] = forecast  # behind all others
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return forecast
