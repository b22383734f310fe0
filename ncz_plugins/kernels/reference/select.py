"""Selector: what AUTO means for a frame, from a sample of its codes, in integer arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..format import (
    DIRECT,
    HUFFMAN32_MOST_BITS,
    PIECE,
    RANS_PAGE,
    SAMPLE_PIECES,
    TOKENS,
    Coder,
    Coding,
    Predictor,
    chunks_of,
    coder_of_gpus,
    tiles_of,
)
from . import huffman, huffman32, planes
from .fixed import packed_bytes, raw_bits
from .symbols import EXTRA_BITS, tokens_of, zigzag

_NEVER = 1 << 62  # picoseconds, more than any frame costs: for a coder that would be replaced anyway


class Sampled(NamedTuple):
    """What a coder takes from the selector's sample.

    Attributes:
        mode: RANS: the most frequent symbol below DIRECT.
        counts: HUFFMAN32: count of each letter.
        is_gapped: HUFFMAN32: whether letters are those of gaps.
    """

    mode: int
    counts: np.ndarray
    is_gapped: bool


def select(codes: np.ndarray, coding: Coding, on_gpus: bool) -> tuple[Coder, Predictor, Sampled]:
    """Coder and predictor for `codes` (int32), and what the coder takes from the sample.

    Args:
        on_gpus: whether to choose among the coders of GPUs.
    """
    pieces = sample(codes)
    if coding.coder != Coder.AUTO:
        coders = (coder_of_gpus(coding.coder) if on_gpus else coding.coder,)
    elif on_gpus:
        coders = Coder.PLANES, Coder.HUFFMAN32  # if two cost the same, the first one
    else:
        coders = Coder.FIXED, Coder.RAW, Coder.HUFFMAN, Coder.RANS
    predictors = (Predictor.NONE, Predictor.DELTA) if coding.predictor == Predictor.AUTO else (coding.predictor,)
    symbols = {p: [_symbols(piece, p) for piece in pieces] for p in predictors}
    cost_of = _cost_on_gpus if on_gpus else _cost
    cost = {p: cost_of(symbols[p], p, codes.size, coding) for p in predictors}
    coder, predictor = min(((c, p) for c in coders for p in predictors), key=lambda pair: cost[pair[1]][pair[0]])
    together = _together(symbols[predictor])
    letters, is_gapped = letters_of(together)
    return coder, predictor, Sampled(mode_of(_counts(together)), _counts_of_letters(letters), is_gapped)


def sample(codes: np.ndarray) -> list[np.ndarray]:
    """At most 64 pieces of 128 codes. The last piece may be shorter."""
    pieces = -(-codes.size // PIECE)
    taken = range(pieces)
    if pieces > SAMPLE_PIECES:
        taken = [i * (pieces - 1) // (SAMPLE_PIECES - 1) for i in range(SAMPLE_PIECES)]
    return [codes[i * PIECE : (i + 1) * PIECE] for i in taken]


def mode_of(counts: np.ndarray) -> int:
    """Most frequent of the symbols below DIRECT, which are their own tokens."""
    return int(counts[:DIRECT].argmax())


def _symbols(piece: np.ndarray, predictor: int) -> np.ndarray:
    """Symbols of one piece after prediction."""
    return zigzag(piece if predictor == Predictor.NONE else np.diff(piece, prepend=piece[:1]))


def _together(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*pieces, np.zeros(0, np.uint32)])


def _counts(symbols: np.ndarray) -> np.ndarray:
    """Count of each token."""
    tokens, _ = tokens_of(symbols)
    return np.bincount(tokens, minlength=TOKENS)


def letters_of(symbols: np.ndarray) -> tuple[huffman32.Letters, bool]:
    """Letters by which HUFFMAN32 writes a sample's symbols, and whether they are those of gaps.

    They are if at least half of the symbols are zero.
    """
    is_gapped = symbols.size > 0 and 2 * np.count_nonzero(symbols) <= symbols.size
    return huffman32.letters_of(huffman32.lanes_of(symbols), is_gapped), is_gapped


def _counts_of_letters(found: huffman32.Letters) -> np.ndarray:
    return np.bincount(found.letters, minlength=TOKENS)


def _cost_on_gpus(pieces: list[np.ndarray], predictor: int, n: int, coding: Coding) -> dict[Coder, int]:
    """Picoseconds that a frame of `n` codes costs with each coder of GPUs."""
    costs = coding.costs
    symbols = _together(pieces)
    m = max(1, symbols.size)
    found, _ = letters_of(symbols)
    counts = _counts_of_letters(found)
    lengths = huffman32.lengths_of(counts)
    in_code = int((counts * lengths[:TOKENS]).sum()) + int(found.bits_behind.sum())
    beside_codes = huffman32.table_bytes(lengths) + 66 * huffman32.pages_of(n)
    beside_planes = 4 * chunks_of(n) + (8 if predictor == Predictor.DELTA else 4) * tiles_of(n)

    def cost(bits: int, bytes: int, picoseconds: int) -> int:
        return costs.link * (bits * n // (8 * m) + bytes) + picoseconds

    gives_way = coding.coder == Coder.AUTO and in_code > HUFFMAN32_MOST_BITS * symbols.size
    return {
        Coder.PLANES: cost(32 * planes.words_of(symbols), beside_planes, costs.fixed * n),
        Coder.HUFFMAN32: _NEVER if gives_way else cost(in_code, beside_codes, costs.huffman * n),
    }


def _cost(pieces: list[np.ndarray], predictor: int, n: int, coding: Coding) -> dict[Coder, int]:
    """Picoseconds that a frame of `n` codes costs with each coder of CPUs."""
    costs = coding.costs
    symbols = _together(pieces)
    m = max(1, symbols.size)
    counts = _counts(symbols)
    extra = int((counts * EXTRA_BITS).sum())
    lengths = huffman.lengths_of(counts)
    mode = mode_of(counts)
    masks = np.bincount(np.packbits(symbols != mode, bitorder="little"), minlength=256)
    others = np.where(np.arange(TOKENS) == mode, 0, counts)
    rest = int(others.sum())
    rans = _entropy(masks) + 3 * max(0, np.count_nonzero(masks) - 1) // 4 + _entropy(others) + extra
    rans_tables = 66 + 2 * (np.count_nonzero(masks) + np.count_nonzero(others))
    chunks, pages = chunks_of(n), -(-n // RANS_PAGE)

    def cost(bits: int, bytes: int, picoseconds: int) -> int:
        return costs.link * (bits * n // (8 * m) + bytes) + picoseconds

    in_code = int((counts * lengths).sum()) + extra
    fixed = 8 * sum(packed_bytes(piece) for piece in pieces)
    return {
        Coder.FIXED: cost(fixed, 2 * chunks, costs.fixed * n),
        Coder.RAW: cost(raw_bits(symbols) * symbols.size, 0, costs.raw * n),
        Coder.HUFFMAN: cost(in_code, huffman.table_bytes(lengths) + 10 * chunks, costs.huffman * n),
        Coder.RANS: cost(rans, rans_tables + 20 * pages, costs.rans * n + costs.rans_rest * (n * rest // m)),
    }


def _entropy(counts: np.ndarray) -> int:
    """Bits of all counted values together, by their entropy."""
    total = int(counts.sum())
    return sum(int(c) * (_log2(total) - _log2(int(c))) for c in counts[counts > 0]) >> 16


def _log2(number: int) -> int:
    """log2 of a positive number, times 65536, rounded down: digit by digit (Knuth, TAOCP 1, 1.2.2, exercise 25)."""
    exponent = number.bit_length() - 1
    x = number << (31 - exponent)  # in 1.31 bits, from 1 to 2
    result = exponent
    for _ in range(16):
        x = x * x >> 31
        result = 2 * result + (x >> 32)
        x >>= x >> 32
    return result
