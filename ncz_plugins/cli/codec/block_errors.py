"""Errors and error bounds of blocks, the elements that share a bound."""

from __future__ import annotations

import numpy as np

from ...core.codec.layout import Layout
from ...core.codec.tensor_codec import TensorCodec
from ...core.config import QuantizerConfig
from ...kernels.format import SCALE_BLOCK


def step_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """The largest of each SCALE_BLOCK elements, [steps], float64. What is the same has none, be it infinite."""
    same = (x == decoded) | (np.isnan(x) & np.isnan(decoded))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(x.astype(np.float64) - decoded))
    return np.maximum.reduceat(errors, np.arange(0, x.size, SCALE_BLOCK)) if x.size else errors


def largest_of_blocks(of_steps: np.ndarray, layout: Layout, block: int) -> np.ndarray:
    """From one number per step to one per block."""
    counts = layout.steps_per_block(block)
    return np.maximum.reduceat(of_steps, np.cumsum(counts) - counts) if layout.steps else np.zeros(1)


def block_bounds(codec: TensorCodec, quantizer: QuantizerConfig) -> np.ndarray:
    """The bound of each block, [blocks], float64, computed from the values, so without the rounding of scales."""
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
    # The square of a float64 may overflow, or vanish; the root mean square is the second of these at least.
    mean = np.add.reduceat(squares, first) / lengths
    return quantizer.value * np.maximum(np.sqrt(np.where(np.isinf(mean), 0, mean)), largest / np.sqrt(lengths))


def largest_share(errors: np.ndarray, bounds: np.ndarray) -> float:
    """The largest error as a share of the bound of its block, both [blocks]."""
    none_allowed = np.where(errors > 0, np.inf, 0.0)
    return float(np.divide(errors, bounds, out=none_allowed, where=bounds > 0).max())
