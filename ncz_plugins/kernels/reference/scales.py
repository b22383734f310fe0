"""Quantization steps of blocks of SCALE_BLOCK elements, for ranks that tell each other root mean squares only.

core/codec/quantize.py explains the formulas, and derives the steps of all other blocks.
"""

from __future__ import annotations

import numpy as np

from ..format import BFLOAT16_ROUNDING, MAX_CODE, SCALE_BLOCK, StepRule, blocks_of
from ..ieee import ieee
from .values import block_statistics


@ieee
def root_mean_squares(x: np.ndarray, most: float) -> np.ndarray:
    """Root mean square of each block of `x` (float32), rounded down to bfloat16, as bits: uint16, [blocks].

    Infinity if a magnitude is larger than `most` or a value is not finite.
    """
    lowest, highest, squares = block_statistics(x)
    lengths = np.minimum(SCALE_BLOCK, x.size - SCALE_BLOCK * np.arange(blocks_of(x.size)))
    largest = np.maximum(highest, -lowest) + 0.0  # not -0.0
    mean = squares / lengths * (1 - 65 * 2.0**-53)  # not above the true mean, however the sum was rounded
    at_least = largest / np.sqrt(lengths)  # a lower bound, also if the squares vanish
    usable = (mean > 1e-290) & np.isfinite(mean)
    rms = np.maximum(np.sqrt(np.where(usable, mean, 0)), at_least)
    rounded = rounded_down(np.where(largest > most, np.inf, rms), np.float32)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@ieee
def steps_of(agreed: np.ndarray, rule: StepRule) -> tuple[np.ndarray, np.ndarray, float]:
    """Inverse steps and scales of blocks, float32, [blocks], from the largest root mean squares among the ranks.

    Args:
        agreed: the maximum over ranks of `root_mean_squares`.

    Returns: inverse steps, scales, and the number of codes that the usual values of a block spread over, in the block
    where that is largest; 0 if a block has no step.
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
    """Smallest bound of each block that leaves a quarter of itself to the step, and whose codes don't overflow."""
    reserved = rule.reserved
    usable = rule.addends * (largest / (MAX_CODE - rule.addends)) / rule.steps_per_bound
    return np.maximum(reserved * largest / (0.75 - reserved), (reserved * largest + usable) / (1 - reserved))


def usable_bound(bound: np.ndarray, largest: np.ndarray, rule: StepRule) -> np.ndarray:
    """Part of a bound that is left after the roundings of the arithmetic."""
    usable = bound - rule.reserved * (largest + bound)
    if rule.rounding:
        # Reserve the rounding of the result as well. It at most doubles a small error, because the result's inputs have
        # the same dtype.
        rounding = rule.rounding * np.maximum(largest + bound, rule.tiny)
        usable = np.maximum(usable - rounding, usable / 2)
    return usable


def rounded_down(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Non-negative values, rounded down to a dtype that may hold fewer digits."""
    rounded = values.astype(dtype)
    return np.where(rounded > values, np.nextafter(rounded, dtype(0)), rounded).astype(dtype)
