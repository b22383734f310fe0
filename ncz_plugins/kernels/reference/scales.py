"""Quantization steps of blocks of SCALE_BLOCK elements of which ranks tell each other the root mean square only.

core/codec/quantize.py says why they are what they are, and finds the steps of all other blocks.
"""

from __future__ import annotations

import numpy as np

from ..format import SCALE_BLOCK, StepRule, blocks_of
from .ieee import ieee
from .values import block_statistics

# The sum of all ranks' codes; less than int32 holds, as products are rounded.
MAX_CODE = 2**31 - 2**10
BFLOAT16_ROUNDING = 1 + 2.0**-7  # what was rounded down to bfloat16 was less than this times as large


@ieee
def root_mean_squares(x: np.ndarray, most: float) -> np.ndarray:
    """Of each block of `x` (float32), rounded down to bfloat16, whose bits are returned: uint16, [blocks].

    Infinity where a magnitude is larger than `most`, or a value is not finite.
    """
    lowest, highest, squares = block_statistics(x)
    lengths = np.minimum(SCALE_BLOCK, x.size - SCALE_BLOCK * np.arange(blocks_of(x.size)))
    largest = np.maximum(highest, -lowest) + 0.0  # not -0.0
    mean = squares / lengths * (1 - 65 * 2.0**-53)  # not too large, however the sum was rounded
    at_least = largest / np.sqrt(lengths)  # the squares may vanish
    usable = (mean > 1e-290) & np.isfinite(mean)
    rms = np.maximum(np.sqrt(np.where(usable, mean, 0)), at_least)
    rounded = rounded_down(np.where(largest > most, np.inf, rms), np.float32)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@ieee
def steps_of(agreed: np.ndarray, rule: StepRule) -> tuple[np.ndarray, np.ndarray, float]:
    """The inverse steps and scales of blocks, float32, [blocks], by the largest of what ranks measured.

    Args:
        agreed: as from `root_mean_squares`.

    Returns besides how many codes the usual values of a block spread over, in that block where they are most; 0 where
    some block has no step.
    """
    rms = (agreed.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if not np.isfinite(rms).all():
        return np.zeros(rms.size, np.float32), np.zeros(rms.size, np.float32), 0.0
    largest = rms * (SCALE_BLOCK**0.5 * BFLOAT16_ROUNDING)
    typical = np.minimum(largest, 4.0 * rms)
    bound = np.maximum(rule.value * rms, rule.least)
    too_fine = bound < finest(largest, rule)
    usable = usable_bound(bound, largest, rule)
    step = rounded_down(np.minimum(rule.steps_per_bound * usable, rule.cap), np.float32)
    spread = np.max(2 * typical / step.astype(np.float64) + 1, initial=0)
    return np.float32(1) / step, step / np.float32(rule.divisor), 0.0 if too_fine.any() else float(spread)


def finest(largest: np.ndarray, rule: StepRule) -> np.ndarray:
    """The smallest bound of each block that leaves a quarter of it to the steps, and whose codes don't overflow."""
    reserved = rule.reserved
    usable = rule.addends * (largest / (MAX_CODE - rule.addends)) / rule.steps_per_bound
    return np.maximum(reserved * largest / (0.75 - reserved), (reserved * largest + usable) / (1 - reserved))


def usable_bound(bound: np.ndarray, largest: np.ndarray, rule: StepRule) -> np.ndarray:
    """What the roundings of the arithmetic leave of a bound."""
    usable = bound - rule.reserved * (largest + bound)
    if rule.rounding:
        # The result's own rounding, too. That of a small error doubles it at most: what was rounded had this dtype.
        rounding = rule.rounding * np.maximum(largest + bound, rule.tiny)
        usable = np.maximum(usable - rounding, usable / 2)
    return usable


def rounded_down(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Values that are not negative, in a dtype that may hold fewer digits."""
    rounded = values.astype(dtype)
    return np.where(rounded > values, np.nextafter(rounded, dtype(0)), rounded).astype(dtype)
