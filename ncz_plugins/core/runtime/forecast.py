"""Forecasts of the lengths of a call's frames, from earlier calls with the same forecast key."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

_CALLS = 4  # a forecast needs this many earlier calls
# In these calls a frame may differ by 1/32 of its length and 512 bytes.
_MAX_DIFFERENCE_DIVISOR = 32
_MAX_DIFFERENCE_BYTES = 512
_MARGIN_DIVISOR = 64  # 1/64 of a length is added to it: those of similar calls differ by less than 1 %
# A forecast stays what it was while its margin is between these shares of a length, so that recorded launches, which
# hold it, can be replayed.
_MIN_MARGIN_DIVISOR, _MAX_MARGIN_DIVISOR = 256, 32
_MAX_KEYS = 256


class Forecast:
    """Expected lengths of the frames of the next call, the same on both ranks, as both learn the same lengths.

    Attributes:
        sizes: bytes that each frame will rarely exceed; None after fewer than 4 calls, or if their lengths differed.
    """

    def __init__(self):
        self._calls: deque[Sequence[int]] = deque(maxlen=_CALLS)
        self.sizes: list[int] | None = None

    def learn(self, sizes: Sequence[int]) -> None:
        """Remember a call.

        Args:
            sizes: for each frame, the bytes of the longer one of both ranks.
        """
        self._calls.append(sizes)
        longest = self._longest()
        if longest is None:
            self.sizes = None
        elif self.sizes is None or not all(map(_still_fits, self.sizes, longest)):
            self.sizes = [size + size // _MARGIN_DIVISOR for size in longest]

    def _longest(self) -> list[int] | None:
        """The longest of the last 4 frames at each place; None if there are fewer, or if their lengths differ."""
        if len(self._calls) < _CALLS:
            return None
        found = []
        for sizes in zip(*self._calls):
            shortest, longest = min(sizes), max(sizes)
            if longest > shortest + shortest // _MAX_DIFFERENCE_DIVISOR + _MAX_DIFFERENCE_BYTES:
                return None
            found.append(longest)
        return found


def _still_fits(size: int, longest: int) -> bool:
    """Whether an expected size is good for frames of which the longest has `longest` bytes."""
    return longest + longest // _MIN_MARGIN_DIVISOR <= size <= longest + longest // _MAX_MARGIN_DIVISOR


class Forecasts:
    """Forecasts by forecast key, for the 256 keys that were used last."""

    def __init__(self):
        self._by_key: dict[Hashable, Forecast] = {}

    def of(self, key: Hashable) -> Forecast:
        """The forecast for calls with this key; a new one for a new key."""
        forecast = self._by_key.pop(key, None) or Forecast()
        self._by_key[key] = forecast  # last in order: the first one is dropped
        if len(self._by_key) > _MAX_KEYS:
            del self._by_key[next(iter(self._by_key))]
        return forecast
