"""Errors and error bounds of blocks. A block is a group of elements that share a bound."""

from __future__ import annotations

import numpy as np

from ...core.codec.layout import Layout
from ...core.codec.tensor_codec import TensorCodec
from ...core.config import QuantizerConfig
from ...kernels.format import SCALE_BLOCK


def step_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Largest error of each SCALE_BLOCK elements, [steps], float64. Equal elements have error 0, even if infinite."""
    same = (x == decoded) | (np.isnan(x) & np.isnan(decoded))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(x.astype(np.float64) - decoded))
    return np.maximum.reduceat(errors, np.arange(0, x.size, SCALE_BLOCK)) if x.size else errors


def largest_of_blocks(of_steps: np.ndarray, layout: Layout, block: int) -> np.ndarray:
    """Maximum of each block, [blocks], of numbers for each step, [steps].

    Args:
        block: elements of a block; 0: the whole tensor.
    """
    counts = layout.steps_per_block(block)
    return np.maximum.reduceat(of_steps, np.cumsum(counts) - counts) if layout.steps else np.zeros(1)


def block_bounds(codec: TensorCodec, quantizer: QuantizerConfig) -> np.ndarray:
    """Bound of each block, [blocks], float64. Computed from the values, before scales are rounded."""
    if quantizer.mode == "abs":
        return np.array([quantizer.value])
    lengths = codec.layout.block_lengths(quantizer.block_in_effect)
    counts = codec.layout.steps_per_block(quantizer.block_in_effect)
    first = np.cumsum(counts) - counts
    low, high, squares = (each.numpy() for each in codec.backend.block_statistics(codec.source.data))
    low, high = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
    largest = np.maximum(-low, high)
    if quantizer.mode == "rel":
        return quantizer.value * largest
    if quantizer.mode == "range":
        return quantizer.value * (high - low)
    # Squares of float64 may overflow or underflow. `largest / sqrt(lengths)` is a lower bound of the root mean square.
    mean = np.add.reduceat(squares, first) / lengths
    return quantizer.value * np.maximum(np.sqrt(np.where(np.isinf(mean), 0, mean)), largest / np.sqrt(lengths))


def largest_share(errors: np.ndarray, bounds: np.ndarray) -> float:
    """Largest error as a share of the bound of its block; inf for an error in a block of bound 0. Both [blocks]."""
    none_allowed = np.where(errors > 0, np.inf, 0.0)
    return float(np.divide(errors, bounds, out=none_allowed, where=bounds > 0).max())
