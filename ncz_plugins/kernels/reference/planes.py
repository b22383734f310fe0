"""Coder PLANES, which is RAW and FIXED for GPUs: tiles of 1,024 codes, whose 32 lanes have their own bit planes."""

from __future__ import annotations

import numpy as np

from ..format import CHUNK, PLANES_LANES, PLANES_ROW, PLANES_TILE, DamagedFrame, Predictor, chunks_of, tiles_of
from .symbols import bit_length, zigzag

_ROWS = PLANES_TILE // PLANES_ROW
_IN_ROW = PLANES_ROW // PLANES_LANES  # consecutive codes of a lane in a row
_VALUES = _ROWS * _IN_ROW  # codes of a lane
_IN_CHUNK = CHUNK // PLANES_TILE  # tiles
_MOST_BITS = 32


def encode(codes: np.ndarray, predictor: int) -> bytes:
    """Payload of codes (int32), with the chunks in order."""
    begins, table, words, at = [], [], [], 0
    for number, first in enumerate(range(0, codes.size, PLANES_TILE)):
        if number % _IN_CHUNK == 0:
            begins.append(at)
        least, most, tile = _encode_tile(codes[first : first + PLANES_TILE], predictor)
        table.append(tile.size | least << 16 | most << 24)
        words.append(tile)
        at += tile.size
    return np.concatenate([np.array(begins + table, dtype="<u4"), *words]).astype("<u4").tobytes()


def decode(payload: np.ndarray, count: int, predictor: int) -> np.ndarray:
    """Codes (int32) of a payload (uint8). Raises DamagedFrame."""
    chunks, tiles = chunks_of(count), tiles_of(count)
    tables = 4 * (chunks + tiles)
    if payload.size < tables or payload.size % 4:
        raise DamagedFrame(
            f"PLANES payload of {payload.size} bytes: its tables take {tables}, and tiles whole words of 4 bytes"
        )
    words = payload.view("<u4").astype(np.int64)
    begins, table, words = np.split(words, [chunks, chunks + tiles])
    sizes = table & 0xFFFF
    if int(sizes.sum()) != words.size:
        raise DamagedFrame(f"tiles add up to {int(sizes.sum())} words, the payload holds {words.size}")
    codes = np.zeros(tiles * PLANES_TILE, dtype=np.int32)
    for tile in range(tiles):
        chunk = tile // _IN_CHUNK
        begin = int(begins[chunk] + sizes[chunk * _IN_CHUNK : tile].sum())
        own = words[begin : begin + int(sizes[tile])].astype(np.uint32)
        least, most = int(table[tile]) >> 16 & 0xFF, int(table[tile]) >> 24
        if own.size < sizes[tile] or not least <= most <= _MOST_BITS:
            raise _damage()
        first = tile * PLANES_TILE
        codes[first : first + PLANES_TILE] = _decode_tile(own, least, most, predictor)
    return codes[:count]


def words_of(symbols: np.ndarray) -> int:
    """Number of 32-bit words of the tiles for these symbols (uint32), without the words that DELTA adds."""
    return sum(
        int(widths.max() - widths.min() + widths.sum())
        for widths in (_widths(symbols[first : first + PLANES_TILE]) for first in range(0, symbols.size, PLANES_TILE))
    )


def _encode_tile(codes: np.ndarray, predictor: int) -> tuple[int, int, np.ndarray]:
    """Narrowest and widest width of a tile's lanes in bits, and its words (uint32)."""
    base = []
    if predictor == Predictor.DELTA:
        base, codes = [codes[:1].view(np.uint32)], np.diff(codes, prepend=codes[:1])
    widths = _widths(zigzag(codes))
    least, most = int(widths.min()), int(widths.max())
    values = _of_lanes(codes).view(np.uint32)
    planes = np.arange(_MOST_BITS, dtype=np.uint32)
    bits = values[:, :, None] >> planes & np.uint32(1)  # [lanes, values, planes]
    words = (bits << np.arange(_VALUES, dtype=np.uint32)[:, None]).sum(axis=1, dtype=np.uint32).T  # [planes, lanes]
    has = planes[:, None] < widths  # [planes, lanes]
    masks = (has << np.arange(PLANES_LANES, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)[least:most]
    return least, most, np.concatenate([*base, masks, words[has]])


def _decode_tile(words: np.ndarray, least: int, most: int, predictor: int) -> np.ndarray:
    """Codes of a tile. Raises DamagedFrame."""
    is_delta = predictor == Predictor.DELTA
    base, masks, words = np.split(words, [int(is_delta), is_delta + most - least])
    has = np.zeros((_MOST_BITS, PLANES_LANES), dtype=bool)
    has[:least] = True
    has[least : least + masks.size] = masks[:, None] >> np.arange(PLANES_LANES, dtype=np.uint32) & np.uint32(1)
    grows = has[1:] & ~has[:-1]  # lanes with a plane above a missing one
    if base.size < is_delta or masks.size < most - least or grows.any() or has.sum() != words.size:
        raise _damage()
    planes = np.zeros(has.shape, dtype=np.uint32)
    planes[has] = words
    for plane in range(1, _MOST_BITS):  # a missing plane repeats the sign, which is the plane below it
        planes[plane] = np.where(has[plane], planes[plane], planes[plane - 1])
    bits = planes[:, :, None] >> np.arange(_VALUES, dtype=np.uint32) & np.uint32(1)  # [planes, lanes, values]
    values = (bits << np.arange(_MOST_BITS, dtype=np.uint32)[:, None, None]).sum(axis=0, dtype=np.uint32)
    codes = values.reshape(PLANES_LANES, _ROWS, _IN_ROW).transpose(1, 0, 2).reshape(-1).view(np.int32)
    if is_delta:
        codes = np.cumsum(codes, dtype=np.int32) + base.view(np.int32)
    return codes


def _of_lanes(tile: np.ndarray) -> np.ndarray:
    """Values of each lane of a tile, filled up with zeros: [lanes, values]."""
    whole = np.zeros(PLANES_TILE, dtype=tile.dtype)
    whole[: tile.size] = tile
    return whole.reshape(_ROWS, PLANES_LANES, _IN_ROW).transpose(1, 0, 2).reshape(PLANES_LANES, _VALUES)


def _widths(symbols: np.ndarray) -> np.ndarray:
    """Bits of each lane's values in two's complement, which are as many as those of their symbols."""
    return bit_length(_of_lanes(symbols).max(axis=1))


def _damage() -> DamagedFrame:
    """Error for a tile that does not fit its table."""
    return DamagedFrame("a PLANES tile is not where it should be, or has other planes than its masks say")
