"""Codes at a fixed rate: equally many bits each, so that all sizes are known before the data are.

A block of RATE_BLOCK elements shares a scale: its largest magnitude over all ranks, M, rounded up to bfloat16. With b
bits, codes go from -L to L, where L = 2**(b - 1) - 1, and one step is M / L. A sum of n codes takes as many bits as n L
needs. Codes are written as symbols (zigzag), each octet of 8 as one little-endian bit string of b bytes, as in FIXED. A
short block is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..format import OCTET, RATE_BLOCK, SCALE_BLOCK, Noise, Rows, rate_blocks_of
from ..ieee import ieee
from .symbols import unzigzag, zigzag
from .values import round_at_random

LEAST_MAGNITUDE = np.uint16(27 << 7)  # 2**-100, as the upper 16 bits of a float32
INFINITE_MAGNITUDE = np.uint16(255 << 7)


def block_magnitudes(x: np.ndarray, rows: Rows) -> np.ndarray:
    """Magnitudes of all blocks of `x` (float32) as bits of bfloat16: uint16, [rows * blocks of a row].

    The order of non-negative floats is that of their bits: numbers, then infinity, then NaN.
    """
    found = np.empty(rows.count * rows.blocks, dtype=np.uint16)
    for i, (elements, _) in enumerate(_blocks(rows)):
        largest = int((x[elements].view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0))
        up = largest + 0xFFFF >> 16
        found[i] = max(min(up, int(INFINITE_MAGNITUDE)), int(LEAST_MAGNITUDE))
    return found


@ieee
def pack(x: np.ndarray, rows: Rows, magnitudes: np.ndarray, bits: int, noise: Noise | None) -> np.ndarray:
    """Codes of the blocks that `rows` covers: uint8, [rows * blocks * RATE_BLOCK / 8 * bits]."""
    levels = np.float32(2 ** (bits - 1) - 1)
    codes = np.zeros((rows.count * rows.blocks, RATE_BLOCK), dtype=np.int32)
    for i, (elements, scale) in enumerate(_blocks(rows)):
        if magnitudes[scale] == INFINITE_MAGNITUDE:
            continue
        # Take the next lower float, so that no product exceeds `levels`, however it is rounded.
        inverse_step = np.nextafter(levels / _as_float(magnitudes[scale]), np.float32(0))
        scaled = x[elements] * inverse_step
        if noise is None:
            code = np.rint(scaled)
        else:
            code = round_at_random(scaled, noise.from_block(int(scale) * (RATE_BLOCK // SCALE_BLOCK)))
        codes[i, : code.size] = code.astype(np.int32)
    return _packed(codes, bits)


def add_packed(packed: np.ndarray, bits: int, out_bits: int) -> np.ndarray:
    """Sums of the codes of all rows of `packed`, uint8, [rows, bytes]: uint8, [bytes * out_bits / bits]."""
    return _packed(sum(_unpacked(row, bits) for row in packed), out_bits)


def unpack(
    packed: np.ndarray, bits: int, rows: Rows, magnitudes: np.ndarray, denominator: float
) -> Iterator[tuple[slice, np.ndarray]]:
    """For each block that `rows` covers, the slice of its elements, and their values, float32.

    Args:
        packed: of each addend, the codes of these blocks: uint8, [addends, bytes].
    """
    codes = sum(_unpacked(each, bits) for each in packed)
    for i, (elements, scale) in enumerate(_blocks(rows)):
        count = elements.stop - elements.start
        if magnitudes[scale] == INFINITE_MAGNITUDE:
            yield elements, np.full(count, np.nan, dtype=np.float32)
        else:
            step = _as_float(magnitudes[scale]) / np.float32(denominator)
            with np.errstate(all="ignore"):
                yield elements, codes[i, :count].astype(np.float32) * step


def _blocks(rows: Rows) -> Iterator[tuple[slice, int]]:
    """For each block that `rows` covers, the slice of its elements, and the number of its magnitude."""
    of_row = rate_blocks_of(rows.elements)
    for row in range(rows.count):
        end = min((row + 1) * rows.elements, rows.numel)
        for block in range(rows.first, rows.first + rows.blocks):
            begin = min(row * rows.elements + block * RATE_BLOCK, end)
            yield slice(begin, min(begin + RATE_BLOCK, end)), row * of_row + block


def _as_float(magnitude: np.uint16) -> np.float32:
    """Value of a magnitude's bits."""
    return np.array(int(magnitude) << 16, dtype=np.uint32).view(np.float32)[()]


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes as symbols of `bits` bits: uint8."""
    octets = zigzag(codes.reshape(-1)).reshape(-1, OCTET)
    each = (octets[:, :, None] >> np.arange(bits, dtype=np.uint32)) & np.uint32(1)
    return np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little")


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `_packed`: int32, [blocks, RATE_BLOCK]."""
    each = np.unpackbits(packed, bitorder="little").reshape(-1, OCTET, bits).astype(np.uint32)
    symbols = (each << np.arange(bits, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return unzigzag(symbols.reshape(-1)).reshape(-1, RATE_BLOCK)
