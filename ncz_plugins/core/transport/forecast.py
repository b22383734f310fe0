"""Forecasts of the lengths of a call's frames, from earlier calls with the same forecast key."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_CALLS = 4  # a forecast needs this many earlier calls
# In these calls a frame may differ by 1/32 of its length and 512 bytes.
_MAX_DIFFERENCE_DIVISOR = 32
_MAX_DIFFERENCE_BYTES = 512
_MARGIN_DIVISOR = 64  # 1/64 of a length is added to it: those of similar calls differ by less than 1 %
_MAX_KEYS = 256


class Forecast:
    """Expected bytes of each frame of the next call, the same on both ranks, as both learn the same lengths."""

    def __init__(self):
        self._calls: deque[Sequence[int]] = deque(maxlen=_CALLS)

    def learn(self, sizes: Sequence[int]) -> None:
        """Remember a call.

        Args:
            sizes: for each frame, the bytes of the longer one of both ranks.
        """
        self._calls.append(sizes)

    @property
    def sizes(self) -> list[int] | None:
        """Bytes that each frame will rarely exceed; None after fewer than 4 calls, or if their lengths differed."""
        if len(self._calls) < _CALLS:
            return None
        for sizes in zip(*self._calls):
            shortest, longest = min(sizes), max(sizes)
            if longest > shortest + shortest // _MAX_DIFFERENCE_DIVISOR + _MAX_DIFFERENCE_BYTES:
                return None
        longest = map(max, zip(*self._calls))
        return [size + size // _MARGIN_DIVISOR for size in longest]


class Forecasts:
    """Forecasts by forecast key, for the 256 keys that were used last."""

    def __init__(self):
        self._by_key: dict[str, Forecast] = {}

    def of(self, key: str) -> Forecast:
        """The forecast for calls with this key; a new one for a new key."""
        forecast = self._by_key.pop(key, None) or Forecast()
        self._by_key[key] = forecast  # last in order: the first one is dropped
        if len(self._by_key) > _MAX_KEYS:
            del self._by_key[next(iter(self._by_key))]
        return forecast
