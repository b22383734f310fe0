"""Coder HUFFMAN32, which is HUFFMAN for GPUs: a code of the selector's sample, and 32 bit strings per page."""

from __future__ import annotations

import numpy as np

from ..format import (
    ESCAPE,
    ESCAPED_BITS,
    HUFFMAN32_LANES,
    HUFFMAN32_MOST_WORDS,
    HUFFMAN32_PAGE,
    HUFFMAN32_ROW,
    TOKENS,
    DamagedFrame,
)
from . import bits, huffman
from .symbols import EXTRA_BITS, FIRST_SYMBOLS, tokens_of

_IN_ROW = HUFFMAN32_ROW // HUFFMAN32_LANES  # consecutive elements of a lane in a row
_LANE_SYMBOLS = HUFFMAN32_PAGE // HUFFMAN32_LANES
_SIZES = HUFFMAN32_LANES // 2  # words of 16 bits that the sizes of a page's lanes take


def encode(symbols: np.ndarray, lengths: np.ndarray) -> bytes | None:
    """Payload of symbols (uint32). None if it would have more than a byte per symbol, or a lane too many words.

    Args:
        lengths: bits of the code of each token and of ESCAPE, see `lengths_of`.
    """
    tokens, extra = tokens_of(symbols)
    codes = huffman.codes_of(lengths)
    has_code = lengths[tokens] > 0
    widths = np.where(has_code, lengths[tokens], lengths[ESCAPE] + ESCAPED_BITS)
    escaped = codes[ESCAPE] | tokens.astype(np.uint64) << np.uint64(lengths[ESCAPE])
    values = np.where(has_code, codes[tokens], escaped) | extra.astype(np.uint64) << widths.astype(np.uint64)
    widths = widths + EXTRA_BITS[tokens]
    pages = []
    for first in range(0, symbols.size, HUFFMAN32_PAGE):
        of_page = slice(first, first + HUFFMAN32_PAGE)
        in_page = np.arange(symbols[of_page].size)
        lanes = [
            _padded(bits.join(values[of_page][in_lane], widths[of_page][in_lane]), 2)
            for in_lane in ((in_page // _IN_ROW) % HUFFMAN32_LANES == lane for lane in range(HUFFMAN32_LANES))
        ]
        sizes = np.array([len(lane) // 2 for lane in lanes])
        if sizes.max() > HUFFMAN32_MOST_WORDS:
            return None
        rows = np.zeros((sizes.max(), HUFFMAN32_LANES), dtype="<u2")
        for lane, words in enumerate(lanes):
            rows[: sizes[lane], lane] = np.frombuffer(words, dtype="<u2")
        page = sizes.astype(np.uint8).tobytes() + rows[_has_word(sizes)[: len(rows)]].tobytes()
        pages.append(_padded(page, 4))
    table = np.array([len(page) // 2 for page in pages], dtype="<u2").tobytes()
    payload = _padded(_table(lengths), 4) + _padded(table, 4) + b"".join(pages)
    return payload if len(payload) <= symbols.size else None


def decode(payload: np.ndarray, count: int) -> np.ndarray:
    """Symbols (uint32) of a payload (uint8). Raises DamagedFrame."""
    lengths, rest = _read_table(payload)
    pages = pages_of(count)
    table = 4 * -(-pages // 2)
    if rest.size < table:
        raise DamagedFrame(f"HUFFMAN32 payload has {rest.size} bytes behind its code, its table of pages takes {table}")
    sizes = 2 * rest[: 2 * pages].view("<u2").astype(np.int64)
    if int(sizes.sum()) != rest.size - table:
        raise DamagedFrame(f"pages add up to {int(sizes.sum())} bytes, the payload holds {rest.size - table}")
    ends = table + np.cumsum(sizes)
    symbols = [
        _decode_page(rest[end - size : end], lengths, min(HUFFMAN32_PAGE, count - HUFFMAN32_PAGE * number))
        for number, (end, size) in enumerate(zip(ends, sizes))
    ]
    return np.concatenate([*symbols, np.zeros(0, np.uint32)])


def _decode_page(page: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
    """Symbols of one page of `count` symbols. Raises DamagedFrame."""
    damage = DamagedFrame("a HUFFMAN32 page does not end where it should")
    sizes = page[:HUFFMAN32_LANES].astype(np.int64)
    if sizes.size < HUFFMAN32_LANES or sizes.max() > HUFFMAN32_MOST_WORDS:
        raise damage
    if page.size != 4 * -(-(_SIZES + int(sizes.sum())) // 2):
        raise damage
    rows = np.zeros((HUFFMAN32_MOST_WORDS, HUFFMAN32_LANES), dtype="<u2")
    rows[_has_word(sizes)] = page[HUFFMAN32_LANES : HUFFMAN32_LANES + 2 * int(sizes.sum())].view("<u2")
    lane_bits = 16 * HUFFMAN32_MOST_WORDS
    windows = bits.Windows(np.concatenate([rows.T.reshape(-1).view(np.uint8), np.zeros(8, np.uint8)]))
    begins = lane_bits * np.arange(HUFFMAN32_LANES)
    position, ends = begins.copy(), begins + 16 * sizes
    elements = np.arange(_LANE_SYMBOLS)
    of_lane = HUFFMAN32_ROW * (elements // _IN_ROW) + elements % _IN_ROW + _IN_ROW * np.arange(HUFFMAN32_LANES)[:, None]
    entries = huffman.entries_of(lengths)
    symbols = np.zeros(HUFFMAN32_PAGE, dtype=np.uint32)
    for step in range(_LANE_SYMBOLS):
        is_there = of_lane[:, step] < count
        if not is_there.any():
            break
        window = windows.at(np.minimum(position, ends))
        letters = entries[window & np.uint64(len(entries) - 1)]
        taken = lengths[letters]
        is_escaped = letters == ESCAPE
        tokens = (window >> taken.astype(np.uint64) & np.uint64((1 << ESCAPED_BITS) - 1)).astype(np.int64)
        tokens = np.where(is_escaped, tokens, letters)
        taken = taken + np.where(is_escaped, ESCAPED_BITS, 0)
        if (tokens[is_there] >= TOKENS).any():
            raise damage
        tokens = np.minimum(tokens, TOKENS - 1)
        low = window >> taken.astype(np.uint64) & (
            (np.uint64(1) << EXTRA_BITS[tokens].astype(np.uint64)) - np.uint64(1)
        )
        symbols[of_lane[:, step]] = FIRST_SYMBOLS[tokens] + 2 * low.astype(np.uint32)
        position += np.where(is_there, taken + EXTRA_BITS[tokens], 0)
    left = ends - position
    if (left < 0).any() or (left > 15).any():
        raise damage
    if (windows.at(position) & ~(~np.uint64(0) << left.astype(np.uint64))).any():
        raise damage
    return symbols[:count]


def pages_of(count: int) -> int:
    """Number of pages of `count` codes. The last page may be short."""
    return -(-count // HUFFMAN32_PAGE)


def lengths_of(counts: np.ndarray) -> np.ndarray:
    """Bits of the code of each token and of ESCAPE, from the counts of tokens in a sample."""
    return huffman.lengths_of(np.append(counts, 1))


def table_bytes(lengths: np.ndarray) -> int:
    """Bytes of the code's lengths in a payload."""
    return len(_padded(_table(lengths), 4))


def _table(lengths: np.ndarray) -> bytes:
    """Lengths of the code as they stand in a payload: the length of ESCAPE, then HUFFMAN's table."""
    stored = int(np.flatnonzero(lengths[:TOKENS]).max(initial=-1)) + 1
    return bytes([stored]) + huffman.nibbles_of([lengths[ESCAPE], *lengths[:stored]])


def _read_table(payload: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths at the start of a payload, and the rest of it. Raises DamagedFrame."""
    stored = int(payload[0]) if payload.size else TOKENS + 1
    size = 1 + stored // 2 + 1
    if stored > TOKENS or payload.size < -(-size // 4) * 4:
        raise DamagedFrame(f"HUFFMAN code has {stored} lengths in a payload of {payload.size} bytes")
    lengths = np.zeros(TOKENS + 2, dtype=np.int64)  # one more for the filling of the last byte
    escape, *rest = huffman.lengths_in(payload[1:size])
    lengths[: len(rest)] = rest
    last_occurs = not stored or lengths[stored - 1] > 0
    if lengths[stored:].any() or not last_occurs:
        raise DamagedFrame("HUFFMAN code is not complete")
    lengths[ESCAPE] = escape
    huffman.check_complete(lengths)
    return lengths[: TOKENS + 1], payload[-(-size // 4) * 4 :]


def _has_word(sizes: np.ndarray) -> np.ndarray:
    """Whether a lane has a word in a row: bool, [rows, lanes]."""
    return np.arange(HUFFMAN32_MOST_WORDS)[:, None] < sizes


def _padded(data: bytes, unit: int) -> bytes:
    """`data` with zeros up to a multiple of `unit` bytes."""
    return data + bytes(-len(data) % unit)
