"""Differences between floats, as integers of their bits: exact, and small where floats are close to each other."""

from __future__ import annotations

import numpy as np


def differences(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """How many floats lie between two, with a sign: int32. `x`, `base`: bits, int16 or int32. It wraps."""
    return (ordered(x) - ordered(base)).astype(np.int32)


def restored(codes: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The bits of the floats whose `differences` from `base` are `codes`."""
    return ordered(ordered(base) + codes.astype(base.dtype))


def ordered(bits: np.ndarray) -> np.ndarray:
    """Bits of floats to integers in the same order, and back: below zero all bits but the sign are flipped."""
    return bits ^ (bits >> (8 * bits.itemsize - 1) & np.iinfo(bits.dtype).max)
