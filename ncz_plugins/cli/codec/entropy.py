"""The entropy of codes."""

from __future__ import annotations

import numpy as np


class Occurrences:
    """How often each code occurs."""

    def __init__(self):
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # values and their counts
        self._joined = 0  # values in the first part, in which all that came before it is joined

    def add(self, codes: np.ndarray) -> None:
        self._parts.append(np.unique(codes, return_counts=True))
        # Not before as many have come again, so that a wide distribution does not take quadratic time.
        if sum(values.size for values, _ in self._parts) > 2 * self._joined + (1 << 20):
            self._join()

    def entropy(self) -> float:
        """Of order 0, in bits per code."""
        self._join()
        _, counts = self._parts[0]
        shares = counts / counts.sum()
        return float((shares * -np.log2(shares)).sum())

    def _join(self) -> None:
        values, counts = (np.concatenate(each) for each in zip(*self._parts))
        values, which = np.unique(values, return_inverse=True)
        self._parts = [(values, np.bincount(which, weights=counts))]
        self._joined = values.size
