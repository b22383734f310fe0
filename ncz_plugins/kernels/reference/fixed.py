"""Coders RAW and FIXED of CPUs."""

from __future__ import annotations

import numpy as np

from ..format import BLOCK, CHUNK, OCTET, DamagedFrame, chunks_of
from .symbols import bit_length


def raw_bits(symbols: np.ndarray) -> int:
    """Width of RAW symbols: the smallest of 8, 16 and 32 bits that holds the largest symbol."""
    largest = int(symbols.max(initial=0))
    return 8 if largest < 1 << 8 else 16 if largest < 1 << 16 else 32


def encode_raw(symbols: np.ndarray) -> bytes:
    """RAW payload of symbols (uint32)."""
    return symbols.astype(f"<u{raw_bits(symbols) // 8}").tobytes()


def decode_raw(payload: np.ndarray, count: int, width: int) -> np.ndarray:
    """Symbols (uint32) of a RAW payload (uint8). Raises DamagedFrame."""
    if payload.size != count * width // 8:
        raise DamagedFrame(f"RAW payload has {payload.size} bytes for {count} symbols of {width} bits")
    return payload.view(f"<u{width // 8}").astype(np.uint32)


def encode_fixed(symbols: np.ndarray) -> bytes:
    """FIXED payload of symbols (uint32): the size of each chunk, then the chunks."""
    chunks = [_pack(symbols[i : i + CHUNK]) for i in range(0, symbols.size, CHUNK)]
    return np.array([len(c) for c in chunks], dtype="<u2").tobytes() + b"".join(chunks)


def decode_fixed(payload: np.ndarray, count: int) -> np.ndarray:
    """Symbols (uint32) of a FIXED payload (uint8). Raises DamagedFrame."""
    chunks = chunks_of(count)
    table = 2 * chunks
    if payload.size < table:
        raise DamagedFrame(f"FIXED payload has {payload.size} bytes, fewer than its table of {table}")
    sizes = payload[:table].view("<u2").astype(np.int64)
    if table + int(sizes.sum()) != payload.size:
        raise DamagedFrame(f"chunk sizes add up to {int(sizes.sum())} bytes, the payload holds {payload.size - table}")
    ends = table + np.cumsum(sizes)
    symbols = np.empty(count, dtype=np.uint32)
    for c in range(chunks):
        part = symbols[c * CHUNK : (c + 1) * CHUNK]
        part[:] = _unpack(payload[ends[c] - sizes[c] : ends[c]], part.size)
    return symbols


def packed_bytes(symbols: np.ndarray) -> int:
    """Bytes of the blocks of one chunk, or of a part of it."""
    widths = _widths(symbols)
    return int(widths.size + _octet_widths(widths, symbols.size).sum())


def _widths(symbols: np.ndarray) -> np.ndarray:
    """Bits of the largest symbol in each block of one chunk."""
    blocks = np.zeros((-(-symbols.size // BLOCK), BLOCK), dtype=np.uint32)
    blocks.reshape(-1)[: symbols.size] = symbols
    return bit_length(blocks.max(axis=1, initial=0)).astype(np.uint8)


def _octet_widths(widths: np.ndarray, count: int) -> np.ndarray:
    """Bytes of each octet of a chunk of `count` symbols: 8 symbols of `width` bits are `width` bytes."""
    return np.repeat(widths.astype(np.int64), BLOCK // OCTET)[: -(-count // OCTET)]


def _pack(symbols: np.ndarray) -> bytes:
    """Width bytes of a chunk's blocks, then for each octet its 8 symbols as one little-endian bit string."""
    widths = _widths(symbols)
    sizes = _octet_widths(widths, symbols.size)
    octets = np.zeros((sizes.size, OCTET), dtype=np.uint32)
    octets.reshape(-1)[: symbols.size] = symbols
    starts = np.cumsum(sizes) - sizes
    packed = np.empty(int(sizes.sum()), dtype=np.uint8)
    for width in np.unique(sizes):
        rows = sizes == width
        bits = (octets[rows][:, :, None] >> np.arange(width, dtype=np.uint32)) & np.uint32(1)
        data = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").reshape(rows.sum(), width)
        packed[starts[rows][:, None] + np.arange(width)] = data
    return widths.tobytes() + packed.tobytes()


def _unpack(chunk: np.ndarray, count: int) -> np.ndarray:
    """Inverse of `_pack`, for a chunk of `count` symbols. Raises DamagedFrame."""
    blocks = -(-count // BLOCK)
    widths = chunk[:blocks]
    if widths.size < blocks or (widths > 32).any():
        raise DamagedFrame("FIXED chunk has a width over 32 or too few width bytes")
    sizes = _octet_widths(widths, count)
    packed = chunk[blocks:]
    if int(sizes.sum()) != packed.size:
        raise DamagedFrame(f"FIXED chunk has {chunk.size} bytes, its widths need another number")
    starts = np.cumsum(sizes) - sizes
    octets = np.empty((sizes.size, OCTET), dtype=np.uint32)
    for width in np.unique(sizes):
        rows = sizes == width
        data = packed[starts[rows][:, None] + np.arange(width)]
        bits = np.unpackbits(data.reshape(-1), bitorder="little").reshape(rows.sum(), OCTET, width)
        octets[rows] = (bits.astype(np.uint32) << np.arange(width, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return octets.reshape(-1)[:count]
