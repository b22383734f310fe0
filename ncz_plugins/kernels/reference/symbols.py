"""Symbols and tokens: codes to symbols (prediction, zigzag) to tokens (the alphabet of HUFFMAN and RANS), and back."""

from __future__ import annotations

import numpy as np

from ..format import BITS_IN_TOKEN, CHUNK, DIRECT, TOKENS, Predictor, chunks_of

_FIRST_EXPONENT = DIRECT.bit_length() - 1


def predict(codes: np.ndarray, predictor: int) -> np.ndarray:
    """Symbols (uint32) of codes: zigzag of the differences from the prediction.

    Small magnitudes become small symbols.
    """
    if predictor == Predictor.DELTA:
        previous = np.roll(codes, 1)
        previous[::CHUNK] = 0
        codes = codes - previous  # wraps modulo 2**32, as does its inverse
    return zigzag(codes)


def unpredict(symbols: np.ndarray, predictor: int) -> np.ndarray:
    """Inverse of `predict`."""
    codes = unzigzag(symbols)
    if predictor == Predictor.DELTA:
        padded = np.zeros(chunks_of(codes.size) * CHUNK, dtype=np.int32)
        padded[: codes.size] = codes
        sums = np.cumsum(padded.reshape(-1, CHUNK), axis=1, dtype=np.int32)
        codes = sums.reshape(-1)[: codes.size]
    return codes


def zigzag(codes: np.ndarray) -> np.ndarray:
    """Symbols (uint32) of codes (int32): 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    return (codes.view(np.uint32) << np.uint32(1)) ^ (codes >> 31).view(np.uint32)


def unzigzag(symbols: np.ndarray) -> np.ndarray:
    """Inverse of `zigzag`."""
    return ((symbols >> np.uint32(1)) ^ (~(symbols & np.uint32(1)) + np.uint32(1))).view(np.int32)


def bit_length(symbols: np.ndarray) -> np.ndarray:
    """Number of bits of each symbol, 0 for 0."""
    _, exponents = np.frexp(symbols.astype(np.float64))
    return exponents


def tokens_of(symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token of each symbol (int64), and its extra bits (uint32), of which there are `extra_bits`."""
    exponents = np.maximum(bit_length(symbols) - 1, _FIRST_EXPONENT)
    extra = (exponents - BITS_IN_TOKEN).astype(np.uint32)
    second = (symbols >> (extra + np.uint32(1))) & np.uint32(1)  # the bit below the leading one
    sign = symbols & np.uint32(1)
    large = DIRECT + ((exponents - _FIRST_EXPONENT) << BITS_IN_TOKEN) + 2 * second + sign
    is_large = symbols >= DIRECT
    between = (symbols >> np.uint32(1)) & ((np.uint32(1) << extra) - np.uint32(1))
    return np.where(is_large, large, symbols).astype(np.int64), np.where(is_large, between, 0).astype(np.uint32)


def extra_bits(tokens: np.ndarray) -> np.ndarray:
    """Number of extra bits behind each token."""
    exponents = _FIRST_EXPONENT + ((tokens - DIRECT) >> BITS_IN_TOKEN)
    return np.where(tokens < DIRECT, 0, exponents - BITS_IN_TOKEN)


def first_symbols(tokens: np.ndarray) -> np.ndarray:
    """Smallest symbol of each token (uint32). A symbol is that plus twice its extra bits."""
    extra = extra_bits(tokens).astype(np.uint32)
    second, sign = (tokens >> 1 & 1).astype(np.uint32), (tokens & 1).astype(np.uint32)
    large = (2 + second) << (extra + np.uint32(1)) | sign
    return np.where(tokens < DIRECT, tokens, large).astype(np.uint32)


EXTRA_BITS = extra_bits(np.arange(TOKENS))
FIRST_SYMBOLS = first_symbols(np.arange(TOKENS))
