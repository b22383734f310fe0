"""Coder RANS: a mask for each eight symbols, and tokens for those that differ from the mode, both coded by rANS.

All pages are coded in lockstep, one numpy operation for a step of every state of every page.
"""

from __future__ import annotations

import numpy as np

from ..format import DIRECT, RANS_BITS, RANS_LANES, RANS_LOWEST, RANS_PAGE, TOKENS, DamagedFrame
from . import bits
from .symbols import EXTRA_BITS, FIRST_SYMBOLS, tokens_of

_WHOLE = 1 << RANS_BITS
_LANES = np.arange(RANS_LANES)
_MASKS = RANS_PAGE // 8


def encode(symbols: np.ndarray, mode: int) -> bytes:
    """Payload of symbols (uint32).

    Args:
        mode: the most frequent symbol, below DIRECT.
    """
    pages = -(-symbols.size // RANS_PAGE)
    padded = np.full(pages * RANS_PAGE, mode, dtype=np.uint32)
    padded[: symbols.size] = symbols
    differs = (padded != mode).reshape(pages, RANS_PAGE)
    masks = np.packbits(differs, axis=1, bitorder="little")
    in_page = np.minimum(RANS_PAGE, symbols.size - RANS_PAGE * np.arange(pages))
    mask_counts = -(-in_page // 8)
    token_counts = differs.sum(axis=1)
    tokens, extra = tokens_of(padded[differs.reshape(-1)])
    extra_parts = [
        bits.join(part, EXTRA_BITS[which])
        for part, which in zip(_split(extra, token_counts), _split(tokens, token_counts))
    ]
    used_masks = masks[np.arange(_MASKS) < mask_counts[:, None]]
    mask_frequencies = frequencies_of(np.bincount(used_masks, minlength=256))
    token_frequencies = frequencies_of(np.bincount(tokens, minlength=TOKENS))
    coder = _Encoder(pages, int(symbols.size + used_masks.size))
    coder.put(_rows(tokens, token_counts), token_counts, token_frequencies)
    coder.put(masks, mask_counts, mask_frequencies)
    words = coder.words()
    table = np.array([[len(w), len(e)] for w, e in zip(words, extra_parts)], dtype="<u2").tobytes()
    head = bytes([mode]) + _table(mask_frequencies) + _table(token_frequencies) + table
    states = coder.states.astype("<u4")
    return head + b"".join(s.tobytes() + w.tobytes() + e for s, w, e in zip(states, words, extra_parts))


def decode(payload: np.ndarray, count: int) -> np.ndarray:
    """Symbols (uint32) of a payload (uint8). Raises DamagedFrame."""
    pages = -(-count // RANS_PAGE)
    mode = int(payload[0]) if payload.size else DIRECT
    if mode >= DIRECT:
        raise DamagedFrame(f"RANS payload of {payload.size} bytes begins with mode {mode}")
    mask_frequencies, rest = _read_table(payload[1:], 256)
    token_frequencies, rest = _read_table(rest, TOKENS)
    if rest.size < 4 * pages:
        raise DamagedFrame(f"RANS payload has {rest.size} bytes behind its frequencies, its pages' table takes more")
    words, extra_bytes = rest[: 4 * pages].view("<u2").reshape(pages, 2).astype(np.int64).T
    sizes = 4 * RANS_LANES + 2 * words + extra_bytes
    if 4 * pages + int(sizes.sum()) != rest.size:
        raise DamagedFrame(f"pages add up to {int(sizes.sum())} bytes, the payload holds {rest.size - 4 * pages}")
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    damaged = DamagedFrame("a RANS page is not what its frequencies allow, or does not end where it should")
    starts = 4 * pages + np.cumsum(sizes) - sizes
    coder = _Decoder(rest, starts, words)
    in_page = np.minimum(RANS_PAGE, count - RANS_PAGE * np.arange(pages))
    if not mask_frequencies.any():
        raise damaged
    masks = coder.take(-(-in_page // 8), mask_frequencies).astype(np.uint8)
    differs = np.zeros((pages, RANS_PAGE), dtype=bool)
    differs[:, : 8 * masks.shape[1]] = np.unpackbits(masks, axis=1, bitorder="little")
    beyond = np.arange(RANS_PAGE) >= in_page[:, None]
    if (differs & beyond).any():
        raise damaged
    token_counts = differs.sum(axis=1)
    if token_counts.any() and not token_frequencies.any():
        raise damaged
    rows = coder.take(token_counts, token_frequencies)
    if not coder.ended():
        raise damaged
    tokens = rows[np.arange(rows.shape[1]) < token_counts[:, None]]
    symbols = FIRST_SYMBOLS[tokens]
    extra_starts = starts + 4 * RANS_LANES + 2 * words
    parts = zip(_split(tokens, token_counts), _split(symbols, token_counts), extra_starts, extra_bytes)
    for page_tokens, page_symbols, start, size in parts:
        widths = EXTRA_BITS[page_tokens]
        total = int(widths.sum())
        windows = bits.Windows(rest[start : start + size])
        if -(-total // 8) != size or (windows.at(np.array([total])) != 0).any():
            raise damaged
        low = windows.at(np.cumsum(widths) - widths)
        page_symbols += 2 * (low & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))).astype(np.uint32)
    all_symbols = np.full(differs.shape, mode, dtype=np.uint32)
    all_symbols[differs] = symbols
    return all_symbols.reshape(-1)[:count]


def frequencies_of(counts: np.ndarray) -> np.ndarray:
    """Frequencies in 1/4096 (int64) of values that occur `counts` times. All 0 if no value occurs."""
    total = int(counts.sum())
    if not total:
        return np.zeros_like(counts, dtype=np.int64)
    frequencies = np.where(counts > 0, np.maximum(1, counts.astype(np.int64) * _WHOLE // total), 0)
    frequencies[frequencies.argmax()] += max(0, _WHOLE - int(frequencies.sum()))
    while frequencies.sum() > _WHOLE:
        frequencies[frequencies.argmax()] -= 1
    return frequencies


class _Encoder:
    """Encoder with four states for each page. They take their values from the last to the first."""

    def __init__(self, pages: int, most_words: int):
        self.states = np.full((pages, RANS_LANES), RANS_LOWEST, dtype=np.int64)
        self._words = np.zeros((pages, most_words), dtype="<u2")
        self._first = np.full(pages, most_words)  # index of the first word; words are written from the end

    def put(self, values: np.ndarray, counts: np.ndarray, frequencies: np.ndarray) -> None:
        """Encode the first `counts[page]` of `values[page]`."""
        starts = np.cumsum(frequencies) - frequencies
        for step in reversed(range(-(-int(counts.max(initial=0)) // RANS_LANES))):
            which = RANS_LANES * step + _LANES
            active = which < counts[:, None]
            value = values[:, np.minimum(which, values.shape[1] - 1)]
            f, s, x = np.where(active, frequencies[value], 1), starts[value], self.states
            full = active & (x >> (32 - RANS_BITS) >= f)
            behind = np.cumsum(full[:, ::-1], axis=1)[:, ::-1]  # words of this and the later lanes
            page, lane = np.nonzero(full)
            self._words[page, self._first[page] - behind[page, lane]] = x[page, lane] & 0xFFFF
            self._first -= full.sum(axis=1)
            x = np.where(full, x >> 16, x)
            self.states = np.where(active, (x // f << RANS_BITS) + x % f + s, self.states)

    def words(self) -> list[np.ndarray]:
        """Words of each page."""
        return [row[first:] for row, first in zip(self._words, self._first)]


class _Decoder:
    """Decoder with four states for each page."""

    def __init__(self, data: np.ndarray, starts: np.ndarray, words: np.ndarray):
        self._data = np.concatenate([data, np.zeros(4 * RANS_LANES, dtype=np.uint8)])
        places = starts[:, None] + np.arange(4 * RANS_LANES)
        self.states = self._data[places].view("<u4").astype(np.int64)
        self._next = starts + 4 * RANS_LANES
        self._end = self._next + 2 * words

    def take(self, counts: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
        """Next `counts[page]` values of each page: a row for each page, filled up with zeros."""
        starts = np.cumsum(frequencies) - frequencies
        value_at = np.repeat(np.arange(frequencies.size), frequencies)
        steps = -(-int(counts.max(initial=0)) // RANS_LANES)
        values = np.zeros((len(counts), steps * RANS_LANES), dtype=np.int64)
        for step in range(steps):
            which = RANS_LANES * step + _LANES
            active = which < counts[:, None]
            slot = self.states & (_WHOLE - 1)
            value = value_at[slot]
            x = frequencies[value] * (self.states >> RANS_BITS) + slot - starts[value]
            empty = active & (x < RANS_LOWEST)
            at = self._next[:, None] + 2 * (np.cumsum(empty, axis=1) - empty)
            at = np.minimum(at, self._data.size - 2)
            word = self._data[at].astype(np.int64) | self._data[at + 1].astype(np.int64) << 8
            self._next = self._next + 2 * empty.sum(axis=1)
            self.states = np.where(active, np.where(empty, x << 16 | word, x), self.states)
            values[:, which] = np.where(active, value, 0)
        return values

    def ended(self) -> bool:
        """Whether all states and words have ended as they must after the last value."""
        return bool((self.states == RANS_LOWEST).all() and (self._next == self._end).all())


def _split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Views of the first counts[0] values, the next counts[1], and so on."""
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def _rows(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Values as a row for each page, filled up with zeros."""
    rows = np.zeros((len(counts), max(1, int(counts.max(initial=0)))), dtype=np.int64)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = values
    return rows


def _table(frequencies: np.ndarray) -> bytes:
    """Frequencies as they stand in a payload."""
    present = np.zeros(256, dtype=bool)
    present[: frequencies.size] = frequencies > 0
    return np.packbits(present, bitorder="little").tobytes() + frequencies[frequencies > 0].astype("<u2").tobytes()


def _read_table(data: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies at the start of `data`, and the rest of it. All zero is allowed: no such value occurs.

    Raises DamagedFrame.
    """
    present = np.flatnonzero(np.unpackbits(data[:32], bitorder="little"))
    end = 32 + 2 * present.size
    if data.size < end or (present >= size).any():
        raise DamagedFrame("RANS payload is too short for its frequencies, or they are of unknown values")
    stored = data[32:end].view("<u2").astype(np.int64)
    if (stored == 0).any() or int(stored.sum()) != (_WHOLE if present.size else 0):
        raise DamagedFrame("RANS frequencies do not add up to the whole")
    frequencies = np.zeros(size, dtype=np.int64)
    frequencies[present] = stored
    return frequencies, data[end:]
