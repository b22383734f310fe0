"""Combination of uncompressed values of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from ..format import Combination
from ..ieee import ieee

_OPERATORS: dict[Combination, np.ufunc] = {
    Combination.ADD: np.add,
    Combination.MULTIPLY: np.multiply,
    Combination.LOWEST: np.minimum,
    Combination.HIGHEST: np.maximum,
}


@ieee
def combined(values: Sequence[np.ndarray], combination: Combination, divisor: int) -> np.ndarray:
    """Values of all ranks combined in their order, then divided if they are floats."""
    total = reduce(_OPERATORS[combination], values)
    return total / total.dtype.type(divisor) if divisor != 1 and total.dtype.kind == "f" else total
