"""Numbers as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """1234567 is "1.23 MB"."""
    return _scaled(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def duration(seconds: float) -> str:
    """0.0123 is "12.3 ms"."""
    return _scaled(seconds, (("s", 1), ("ms", 1e-3), ("us", 1e-6)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """In the largest unit of which there is at least one, with three digits."""
    name, unit = next(((name, unit) for name, unit in units if value >= unit), units[-1])
    return f"{value / unit:.3g} {name}"
