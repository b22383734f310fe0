"""Differences between floats, as integers of their bits: exact, and small for floats that are close to each other."""

from __future__ import annotations

import numpy as np


def differences(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Number of floats from `base` to `x`, with a sign: int32. Both are bits of floats: int16 or int32. Wraps."""
    return (ordered(x) - ordered(base)).astype(np.int32)


def restored(codes: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Bits of the floats whose `differences` from `base` are `codes`."""
    return ordered(ordered(base) + codes.astype(base.dtype))


def ordered(bits: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats with these bits; its own inverse.

    Below zero, all bits but the sign are flipped.
    """
    return bits ^ (bits >> (8 * bits.itemsize - 1) & np.iinfo(bits.dtype).max)
