"""Coder HUFFMAN32, which is HUFFMAN for GPUs: a code of the selector's sample, and 32 bit strings per page.

Letters are tokens. If symbols are mostly zero, letters are those of gaps: a letter stands for the zeros in front of
another symbol, and for that symbol.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..format import (
    ESCAPE,
    ESCAPED_BITS,
    GAP_LENGTHS,
    GAP_LETTERS,
    GAP_SYMBOLS,
    HUFFMAN32_LANES,
    HUFFMAN32_MOST_WORDS,
    HUFFMAN32_PAGE,
    HUFFMAN32_ROW,
    NO_MORE,
    TOKENS,
    DamagedFrame,
)
from . import bits, huffman
from .symbols import EXTRA_BITS, FIRST_SYMBOLS, bit_length, tokens_of

_IN_ROW = HUFFMAN32_ROW // HUFFMAN32_LANES  # consecutive elements of a lane in a row
_LANE_SYMBOLS = HUFFMAN32_PAGE // HUFFMAN32_LANES
_SIZES = HUFFMAN32_LANES // 2  # words of 16 bits that the sizes of a page's lanes take


class Letters(NamedTuple):
    """Letters of all lanes, one lane after another, and the bits behind each: numbers of so many bits, lowest first."""

    letters: np.ndarray  # int64
    behind: np.ndarray  # uint64
    bits_behind: np.ndarray  # int64
    ends: np.ndarray  # int64: where the letters of each lane end


def encode(symbols: np.ndarray, lengths: np.ndarray, is_gapped: bool) -> bytes | None:
    """Payload of symbols (uint32). None if it would have more than a byte per symbol, or a lane too many words.

    Args:
        lengths: bits of the code of each letter and of ESCAPE, see `lengths_of`.
        is_gapped: whether letters are those of gaps.
    """
    codes = huffman.codes_of(lengths)
    pages = []
    for first in range(0, symbols.size, HUFFMAN32_PAGE):
        letters = letters_of(lanes_of(symbols[first : first + HUFFMAN32_PAGE]), is_gapped)
        lanes = [_padded(string, 2) for string in _bit_strings(letters, lengths, codes)]
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


def lanes_of(page: np.ndarray) -> list[np.ndarray]:
    """Elements of each lane, of a page or of the selector's sample."""
    lanes = np.arange(page.size) // _IN_ROW % HUFFMAN32_LANES
    return [page[lanes == lane] for lane in range(HUFFMAN32_LANES)]


def letters_of(lanes: list[np.ndarray], is_gapped: bool) -> Letters:
    """Letters of the symbols of each lane."""
    symbols, ends = np.concatenate(lanes), np.cumsum([lane.size for lane in lanes])
    if is_gapped:
        return _gaps_of(symbols, ends)
    tokens, extra = tokens_of(symbols)
    return Letters(tokens, extra.astype(np.uint64), EXTRA_BITS[tokens], ends)


def _gaps_of(symbols: np.ndarray, ends: np.ndarray) -> Letters:
    """Letters of the gaps in front of symbols other than zero. NO_MORE is a lane's last one if zeros follow."""
    at = np.flatnonzero(symbols)
    lane = np.searchsorted(ends, at, side="right")
    # A lane's first gap begins where the lane does.
    begins = np.concatenate([[0], ends[:-1]])
    gaps = at - np.maximum(np.concatenate([[0], at + 1])[:-1], begins[lane])
    found = symbols[at]
    gap_lengths = bit_length(gaps).astype(np.int64)
    letters = 1 + GAP_LENGTHS * (np.minimum(found, GAP_SYMBOLS).astype(np.int64) - 1) + gap_lengths
    # Behind the letter are the bits of the gap below its leading one, and what the letter does not say of the symbol.
    bits_behind = np.maximum(gap_lengths - 1, 0)
    behind = (gaps & (1 << bits_behind) - 1).astype(np.uint64)
    tokens, extra = tokens_of(found)
    rest = tokens.astype(np.uint64) | extra.astype(np.uint64) << np.uint64(ESCAPED_BITS)
    is_large = found >= GAP_SYMBOLS
    behind |= np.where(is_large, rest << bits_behind.astype(np.uint64), np.uint64(0))
    bits_behind = bits_behind + np.where(is_large, ESCAPED_BITS + EXTRA_BITS[tokens], 0)
    zeros_follow = (ends > begins) & (symbols[ends - 1] == 0)
    letter_ends = np.searchsorted(lane, np.arange(ends.size), side="right")
    last = letter_ends[zeros_follow]
    letters, behind, bits_behind = (
        np.insert(letters, last, NO_MORE),
        np.insert(behind, last, 0),
        np.insert(bits_behind, last, 0),
    )
    return Letters(letters, behind, bits_behind, letter_ends + np.cumsum(zeros_follow))


def _bit_strings(of: Letters, lengths: np.ndarray, codes: np.ndarray) -> list[bytes]:
    """Of each lane, the code of each letter with what is behind it. Letters without a code are escaped."""
    has_code = lengths[of.letters] > 0
    widths = np.where(has_code, lengths[of.letters], lengths[ESCAPE] + ESCAPED_BITS)
    escaped = codes[ESCAPE] | of.letters.astype(np.uint64) << np.uint64(lengths[ESCAPE])
    values = np.where(has_code, codes[of.letters], escaped) | of.behind << widths.astype(np.uint64)
    lanes = (np.split(each, of.ends[:-1]) for each in (values, widths + of.bits_behind))
    return [bits.join(*lane) for lane in zip(*lanes)]


def decode(payload: np.ndarray, count: int, is_gapped: bool) -> np.ndarray:
    """Symbols (uint32) of a payload (uint8). Raises DamagedFrame."""
    lengths, rest = _read_table(payload, GAP_LETTERS if is_gapped else TOKENS)
    pages = pages_of(count)
    table = 4 * -(-pages // 2)
    if rest.size < table:
        raise DamagedFrame(f"HUFFMAN32 payload has {rest.size} bytes behind its code, its table of pages takes {table}")
    sizes = 2 * rest[: 2 * pages].view("<u2").astype(np.int64)
    if int(sizes.sum()) != rest.size - table:
        raise DamagedFrame(f"pages add up to {int(sizes.sum())} bytes, the payload holds {rest.size - table}")
    ends = table + np.cumsum(sizes)
    symbols = [
        _decode_page(rest[end - size : end], lengths, min(HUFFMAN32_PAGE, count - HUFFMAN32_PAGE * number), is_gapped)
        for number, (end, size) in enumerate(zip(ends, sizes))
    ]
    return np.concatenate([*symbols, np.zeros(0, np.uint32)])


def _decode_page(page: np.ndarray, lengths: np.ndarray, count: int, is_gapped: bool) -> np.ndarray:
    """Symbols of one page of `count` symbols. Raises DamagedFrame."""
    damage = DamagedFrame("a HUFFMAN32 page does not end where it should")
    sizes = page[:HUFFMAN32_LANES].astype(np.int64)
    if sizes.size < HUFFMAN32_LANES or sizes.max() > HUFFMAN32_MOST_WORDS:
        raise damage
    if page.size != 4 * -(-(_SIZES + int(sizes.sum())) // 2):
        raise damage
    rows = np.zeros((HUFFMAN32_MOST_WORDS, HUFFMAN32_LANES), dtype="<u2")
    rows[_has_word(sizes)] = page[HUFFMAN32_LANES : HUFFMAN32_LANES + 2 * int(sizes.sum())].view("<u2")
    if is_gapped:
        symbols = np.zeros(count, dtype=np.uint32)
        for lane, places in enumerate(lanes_of(np.arange(count))):
            words = rows[: sizes[lane], lane]
            symbols[places] = _decode_gaps(words.tobytes(), lengths, places.size, damage)
        return symbols
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


def _decode_gaps(string: bytes, lengths: np.ndarray, count: int, damage: DamagedFrame) -> np.ndarray:
    """Symbols of a lane of `count` symbols. Raises `damage`."""
    entries = huffman.entries_of(lengths)
    left = int.from_bytes(string, "little")
    end, taken = 8 * len(string), 0

    def take(n: int) -> int:
        nonlocal left, taken
        low, left, taken = left & (1 << n) - 1, left >> n, taken + n
        return low

    symbols = np.zeros(count, dtype=np.uint32)
    at = 0  # of the symbols that are known
    while at < count:
        letter = int(entries[left & len(entries) - 1])
        take(int(lengths[letter]))
        letter = take(ESCAPED_BITS) if letter == ESCAPE else letter
        if letter >= GAP_LETTERS or taken > end:
            raise damage
        if letter == NO_MORE:
            break
        symbol, gap_length = divmod(letter - 1, GAP_LENGTHS)
        at += (1 << gap_length - 1 | take(gap_length - 1)) if gap_length else 0
        symbol += 1
        if symbol == GAP_SYMBOLS:
            token = take(ESCAPED_BITS)
            if token >= TOKENS:
                raise damage
            symbol = int(FIRST_SYMBOLS[token]) + 2 * take(int(EXTRA_BITS[token]))
        if at >= count:
            raise damage
        symbols[at] = symbol
        at += 1
    if not 0 <= end - taken <= 15 or left:
        raise damage
    return symbols


def pages_of(count: int) -> int:
    """Number of pages of `count` codes. The last page may be short."""
    return -(-count // HUFFMAN32_PAGE)


def lengths_of(counts: np.ndarray) -> np.ndarray:
    """Bits of the code of each letter and of ESCAPE, from the counts of letters in a sample, TOKENS numbers."""
    return huffman.lengths_of(np.append(counts, 1))


def table_bytes(lengths: np.ndarray) -> int:
    """Bytes of the code's lengths in a payload."""
    return len(_padded(_table(lengths), 4))


def _table(lengths: np.ndarray) -> bytes:
    """Lengths of the code as they stand in a payload: the length of ESCAPE, then HUFFMAN's table."""
    stored = int(np.flatnonzero(lengths[:TOKENS]).max(initial=-1)) + 1
    return bytes([stored]) + huffman.nibbles_of([lengths[ESCAPE], *lengths[:stored]])


def _read_table(payload: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of at most `most` letters at the start of a payload, and the rest of it. Raises DamagedFrame."""
    stored = int(payload[0]) if payload.size else TOKENS + 1
    size = 1 + stored // 2 + 1
    if stored > most or payload.size < -(-size // 4) * 4:
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
