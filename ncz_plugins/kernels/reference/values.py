"""Values to codes and back, statistics of blocks, and random numbers."""

from __future__ import annotations

import numpy as np

from ..format import LANES, SCALE_BLOCK, Noise, blocks_of
from ..ieee import ieee


@ieee
def block_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest value, highest value and sum of squares of each SCALE_BLOCK elements of `x` (float32 or float64).

    All are float64, [blocks]; -inf, +inf and +inf if a block holds a NaN or an infinity, and never -0.0. Squares are
    added in LANES partial sums (element i to sum i mod LANES), then the sums by halving, so that the result does not
    depend on the backend.
    """
    blocks = blocks_of(x.size)
    wide = x.astype(np.float64)
    padded = np.zeros(blocks * SCALE_BLOCK)
    padded[: x.size] = wide
    rows = padded.reshape(blocks, SCALE_BLOCK // LANES, LANES)
    finite = np.isfinite(padded).reshape(blocks, SCALE_BLOCK).all(axis=1)
    sums = np.zeros((blocks, LANES))
    for row in range(SCALE_BLOCK // LANES):
        sums = sums + rows[:, row] * rows[:, row]
    width = LANES // 2
    while width:
        sums = sums[:, :width] + sums[:, width:]
        width //= 2
    starts = np.arange(blocks) * SCALE_BLOCK
    lowest = np.minimum.reduceat(wide, starts) if blocks else wide
    highest = np.maximum.reduceat(wide, starts) if blocks else wide
    return (
        np.where(finite, lowest + 0.0, -np.inf),
        np.where(finite, highest + 0.0, np.inf),
        np.where(finite, sums[:, 0], np.inf),
    )


@ieee
def quantize(x: np.ndarray, inverse_steps: np.ndarray, noise: Noise | None = None) -> np.ndarray:
    """`x` divided by the quantization step, as int32: multiplied in the dtype of `x`, clamped, then rounded.

    Rounds to nearest even if `noise` is None, else up or down at random. `inverse_steps` holds 1 / step for each block
    in the dtype of `x`. NaN becomes the upper limit: callers that must keep NaN check `block_statistics` first.
    """
    limit = x.dtype.type(2147483520.0 if x.dtype == np.float32 else 2147483647.0)
    scaled = x * per_element(inverse_steps, x.size)
    scaled = np.where(scaled < limit, scaled, limit)
    scaled = np.where(scaled > -limit, scaled, -limit)
    if noise is None:
        return np.rint(scaled).astype(np.int32)
    return round_at_random(scaled, noise)


@ieee
def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`code * scale` in the dtype of `scales` (float32 or float64), with one scale per block."""
    return codes.astype(scales.dtype) * per_element(scales, codes.size)


def per_element(per_block: np.ndarray, count: int) -> np.ndarray:
    """Number of each element's block, from numbers per block."""
    return np.repeat(per_block, SCALE_BLOCK)[:count]


@ieee
def round_at_random(scaled: np.ndarray, noise: Noise) -> np.ndarray:
    """floor(scaled + u) as int32, the sum not rounded; u is a random number from 0 to 1, of 24 bits.

    Whole numbers stay as they are. Others are rounded up with a probability of their fraction, less 2**-24 at most.
    """
    u = random_bits(noise, scaled.size).astype(scaled.dtype) * scaled.dtype.type(2.0**-24)
    whole = np.trunc(scaled)
    rest = scaled - whole  # exact, as scaled - floor(scaled) is not
    return whole.astype(np.int32) + (rest >= 1 - u) - (rest < -u).astype(np.int32)


@ieee
def random_bits(noise: Noise, count: int) -> np.ndarray:
    """Random numbers of 24 bits, uint32, for each of `count` elements, of which the first begins a block.

    Four neighbours share a hash of their block's number and theirs in it: three rounds of multiplying, after shifting
    or rotating. Two of them have the second round's word, the others the third's: one its upper 24 bits, one those of
    the word with its halves exchanged. So 16 bits are an element's own, below them are some of its neighbour's.
    Wellons found the first two multipliers by search ("Prospecting for hash functions", 2018), the third is
    MurmurHash3's.
    """
    blocks = np.arange(noise.first, noise.first + blocks_of(count), dtype=np.uint64).astype(np.uint32)
    fours = np.arange(SCALE_BLOCK // 4, dtype=np.uint32)
    low_key, high_key = (np.uint32(half) for half in (noise.key & 0xFFFFFFFF, noise.key >> 32))
    x = blocks[:, None] * np.uint32(0x9E3779B9) + fours * np.uint32(0x2C1B3C6D) + low_key
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15) ^ high_key) * np.uint32(0x846CA68B)
    y = (x << np.uint32(8) | x >> np.uint32(24)) * np.uint32(0xC2B2AE35)
    words = np.stack([x, y], axis=-1) + np.uint32((noise.shift >> 16) * 0x10001)  # both halves move
    exchanged = words << np.uint32(16) | words >> np.uint32(16)
    return (np.stack([words, exchanged], axis=-1) >> np.uint32(8)).reshape(-1)[:count]
