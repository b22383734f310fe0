"""Differences between floats, as integers of their bits: exact, and small for floats that are close to each other."""

from __future__ import annotations

import numpy as np


def differences(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Number of floats from `base` to `x`, with a sign: int32. Both are bits of floats: int16 or int32. Wraps."""
    return (ordered(x) - ordered(base)).astype(np.int32)


def restored(codes: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Bits of the floats whose `differences` from `base` are `codes`."""
    return ordered(ordered(base) + codes.astype(base.dtype))


def places(gaps: np.ndarray, codes: np.ndarray, count: int) -> np.ndarray | None:
    """Numbers of the elements that change, of `count`. None unless there are any, all inside, by codes other than 0."""
    found = np.cumsum(gaps.astype(np.int64) + 1) - 1
    is_right = len(codes) and codes.all() and gaps.min() >= 0 and found[-1] < count
    return found if is_right else None


def ordered(bits: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats with these bits; its own inverse.

    Below zero, all bits but the sign are flipped.
    """
    return bits ^ (bits >> (8 * bits.itemsize - 1) & np.iinfo(bits.dtype).max)
