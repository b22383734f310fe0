"""Entropy of codes."""

from __future__ import annotations

import numpy as np


class Occurrences:
    """Counter of codes: how often each code occurs."""

    def __init__(self):
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # (values, counts)
        self._merged = 0  # number of values in the first part, into which earlier parts were merged

    def add(self, codes: np.ndarray) -> None:
        """Count `codes`, an array of integers."""
        self._parts.append(np.unique(codes, return_counts=True))
        # Merge only after the number of values has doubled, so that wide distributions don't take quadratic time.
        if sum(values.size for values, _ in self._parts) > 2 * self._merged + (1 << 20):
            self._merge()

    def entropy(self) -> float:
        """Order-0 entropy in bits per code."""
        self._merge()
        _, counts = self._parts[0]
        shares = counts / counts.sum()
        return float((shares * -np.log2(shares)).sum())

    def _merge(self) -> None:
        values, counts = (np.concatenate(each) for each in zip(*self._parts))
        values, which = np.unique(values, return_inverse=True)
        self._parts = [(values, np.bincount(which, weights=counts))]
        self._merged = values.size
