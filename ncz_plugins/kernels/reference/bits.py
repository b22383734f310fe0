"""Bit strings: fields of different widths in a row, lowest bit first."""

from __future__ import annotations

import numpy as np


def join(values: np.ndarray, widths: np.ndarray) -> bytes:
    """Bit string of the low `widths[i]` bits of each `values[i]` (uint64), padded with zeros to whole bytes."""
    widths = np.asarray(widths, dtype=np.int64)
    ends = np.cumsum(widths)
    which = np.repeat(np.arange(len(values)), widths)
    position = np.arange(ends[-1] if len(ends) else 0) - (ends - widths)[which]
    bits = (np.asarray(values, dtype=np.uint64)[which] >> position.astype(np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


class Windows:
    """Reader of at least 57 bits from any bit of `data` (uint8), for many positions at once. Zeros follow the end."""

    def __init__(self, data: np.ndarray):
        padded = np.concatenate([data, np.zeros(16, dtype=np.uint8)])
        # The 64 bits that begin at each byte.
        words = np.zeros(padded.size - 8, dtype=np.uint64)
        for k in range(8):
            words |= padded[k : k + words.size].astype(np.uint64) << np.uint64(8 * k)
        self._words = words

    def at(self, first_bits: np.ndarray) -> np.ndarray:
        """The next 57 or more bits from each of `first_bits` (int64), as uint64."""
        at = np.minimum(first_bits >> 3, self._words.size - 1)
        return self._words[at] >> (first_bits & 7).astype(np.uint64)
