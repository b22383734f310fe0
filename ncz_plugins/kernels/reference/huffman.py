"""Coder HUFFMAN of CPUs: a canonical code of at most 11 bits for each token, the same for a whole frame."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..format import CHUNK, HUFFMAN_LANES, HUFFMAN_MAX_LENGTH, TOKENS, DamagedFrame, chunks_of
from . import bits
from .symbols import EXTRA_BITS, FIRST_SYMBOLS, tokens_of

_WHOLE = 1 << HUFFMAN_MAX_LENGTH  # the Kraft sum of a complete code


def encode(symbols: np.ndarray) -> bytes:
    """Payload of symbols (uint32)."""
    tokens, extra = tokens_of(symbols)
    lengths = lengths_of(np.bincount(tokens, minlength=TOKENS))
    widths = lengths[tokens] + EXTRA_BITS[tokens]
    values = codes_of(lengths)[tokens] | extra.astype(np.uint64) << lengths[tokens].astype(np.uint64)
    lanes = [
        bits.join(values[c : c + CHUNK][lane::HUFFMAN_LANES], widths[c : c + CHUNK][lane::HUFFMAN_LANES])
        for c in range(0, symbols.size, CHUNK)
        for lane in range(HUFFMAN_LANES)
    ]
    return _table(lengths) + np.array([len(lane) for lane in lanes], dtype="<u2").tobytes() + b"".join(lanes)


def decode(payload: np.ndarray, count: int) -> np.ndarray:
    """Symbols (uint32) of a payload (uint8). Raises DamagedFrame."""
    lengths, rest = _read_table(payload)
    chunks = chunks_of(count)
    table = 2 * HUFFMAN_LANES * chunks
    if rest.size < table:
        raise DamagedFrame(f"HUFFMAN payload has {rest.size} bytes behind its code, its table of lanes takes {table}")
    sizes = rest[:table].view("<u2").astype(np.int64)
    if table + int(sizes.sum()) != rest.size:
        raise DamagedFrame(f"lane sizes add up to {int(sizes.sum())} bytes, the payload holds {rest.size - table}")
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    entries = entries_of(lengths)
    windows = bits.Windows(rest)
    ends = 8 * (table + np.cumsum(sizes))
    position = ends - 8 * sizes
    in_chunk = np.minimum(CHUNK, count - CHUNK * np.arange(chunks))
    in_lane = (in_chunk[:, None] - np.arange(HUFFMAN_LANES) + HUFFMAN_LANES - 1).reshape(-1) // HUFFMAN_LANES
    symbols = np.zeros((chunks * HUFFMAN_LANES, CHUNK // HUFFMAN_LANES), dtype=np.uint32)
    for step in range(int(in_lane.max())):
        window = windows.at(position)
        tokens = entries[window & np.uint64(_WHOLE - 1)]
        extra = EXTRA_BITS[tokens].astype(np.uint64)
        low = (window >> lengths[tokens].astype(np.uint64)) & ((np.uint64(1) << extra) - np.uint64(1))
        symbols[:, step] = FIRST_SYMBOLS[tokens] + 2 * low.astype(np.uint32)
        position += np.where(step < in_lane, lengths[tokens] + EXTRA_BITS[tokens], 0)
    left = ends - position
    if (
        (left < 0).any()
        or (left > 7).any()
        or (windows.at(position) & ~(~np.uint64(0) << left.astype(np.uint64))).any()
    ):
        raise DamagedFrame("a HUFFMAN lane does not end where it should")
    by_element = symbols.reshape(chunks, HUFFMAN_LANES, -1).transpose(0, 2, 1)
    return by_element.reshape(-1)[:count]


def lengths_of(counts: np.ndarray) -> np.ndarray:
    """Bits of each token's code (int64, 0 for counts of 0). Encoders choose them; decoders read them from the frame."""
    lengths = np.zeros(len(counts), dtype=np.int64)
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda token: (counts[token], token))
    if len(order) == 1:
        order.append(1 if order[0] == 0 else 0)
        lengths[order] = 1
        return lengths
    leaves = deque((int(counts[token]), [token]) for token in order)
    nodes: deque[tuple[int, list[int]]] = deque()

    def smallest() -> tuple[int, list[int]]:
        leaf_first = leaves and (not nodes or leaves[0][0] <= nodes[0][0])
        return leaves.popleft() if leaf_first else nodes.popleft()

    while len(leaves) + len(nodes) > 1:
        (a, below_a), (b, below_b) = smallest(), smallest()
        lengths[below_a + below_b] += 1
        nodes.append((a + b, below_a + below_b))
    _limit(lengths, order)
    return lengths


def _limit(lengths: np.ndarray, order: list[int]) -> None:
    """Limit all lengths to HUFFMAN_MAX_LENGTH, in place, such that the code stays complete."""
    lengths[:] = np.minimum(lengths, HUFFMAN_MAX_LENGTH)
    used = sum(_WHOLE >> int(lengths[token]) for token in order)
    while used > _WHOLE:
        for token in order:
            if used > _WHOLE and lengths[token] < HUFFMAN_MAX_LENGTH:
                lengths[token] += 1
                used -= _WHOLE >> int(lengths[token])
    while order and used < _WHOLE:
        for token in reversed(order):
            while used + (_WHOLE >> int(lengths[token])) <= _WHOLE:
                used += _WHOLE >> int(lengths[token])
                lengths[token] -= 1


def codes_of(lengths: np.ndarray) -> np.ndarray:
    """Code of each token (uint64), first bit lowest."""
    codes = np.zeros(len(lengths), dtype=np.uint64)
    code = 0
    for length in range(1, HUFFMAN_MAX_LENGTH + 1):
        for token in np.flatnonzero(lengths == length):
            codes[token] = int(f"{code:0{length}b}"[::-1], 2)
            code += 1
        code <<= 1
    return codes


def entries_of(lengths: np.ndarray) -> np.ndarray:
    """Token of each possible value of the next 11 bits."""
    entries = np.zeros(_WHOLE, dtype=np.int64)
    codes = codes_of(lengths)
    for token in np.flatnonzero(lengths):
        entries[int(codes[token]) :: 1 << int(lengths[token])] = token
    return entries


def _table(lengths: np.ndarray) -> bytes:
    """Lengths of the code as they stand in a payload."""
    stored = int(np.flatnonzero(lengths).max(initial=-1)) + 1
    return bytes([stored]) + nibbles_of(lengths[:stored])


def _read_table(payload: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths at the start of a payload, and the rest of it. Raises DamagedFrame."""
    stored = int(payload[0]) if payload.size else TOKENS + 1
    size = 1 + (stored + 1) // 2
    if stored > TOKENS or payload.size < size:
        raise DamagedFrame(f"HUFFMAN code has {stored} lengths in a payload of {payload.size} bytes")
    lengths = np.zeros(TOKENS + 1, dtype=np.int64)  # one more for the filling of the last byte
    found = lengths_in(payload[1:size])
    lengths[: found.size] = found
    if lengths[stored:].any() or not stored or not lengths[stored - 1]:
        raise DamagedFrame("HUFFMAN code is not complete")
    check_complete(lengths)
    return lengths[:TOKENS], payload[size:]


def check_complete(lengths: np.ndarray) -> None:
    """Raise DamagedFrame unless a complete code with these lengths exists, in which every bit string has a meaning."""
    if lengths.max() > HUFFMAN_MAX_LENGTH or int((_WHOLE >> lengths[lengths > 0]).sum()) != _WHOLE:
        raise DamagedFrame("HUFFMAN code is not complete")


def nibbles_of(lengths: list[int] | np.ndarray) -> bytes:
    """Lengths of 4 bits each, the first in the low bits. Zeros fill the last byte."""
    nibbles = np.append(lengths, [0] * (len(lengths) % 2)).astype(np.uint8)
    return (nibbles[::2] | nibbles[1::2] << 4).tobytes()


def lengths_in(nibbles: np.ndarray) -> np.ndarray:
    """Inverse of `nibbles_of`, including the filling of the last byte."""
    return np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(-1).astype(np.int64)


def table_bytes(lengths: np.ndarray) -> int:
    """Bytes of the code's lengths in a payload."""
    return len(_table(lengths))
