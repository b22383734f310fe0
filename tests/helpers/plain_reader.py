"""Reads patches with numpy alone, by docs/reference/patch-format.md and docs/reference/wire-format.md.

It shows what a reader takes, and that those two pages suffice. It is slow, and trusts what it reads.
"""

import hmac
import json
import math
import zlib
from collections.abc import Iterator
from itertools import product

import numpy as np

FRAME, CHUNK, PAGE = 1 << 20, 4096, 16384
# Bytes of an element, and whether changes of it are numbers of floats. Complex numbers are pairs.
FLOATS = {"F16": (2, True), "BF16": (2, True), "F32": (4, True), "F64": (8, False)}
PAIRS = {"complex32": "F16", "C64": "F32", "complex128": "F64"}
INTEGERS = {"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


def read(patches: list[bytes], base: dict[str, np.ndarray], key: bytes = b"") -> dict[str, np.ndarray]:
    """The version that the patches of all ranks make: unsigned integers by name, in the shapes that frames have."""
    made, same = dict(base), {}
    for patch in patches:
        assert patch[4] == 3 or hmac.compare_digest(hmac.digest(key, patch[:-32], "sha256"), patch[-32:])
        size = int.from_bytes(patch[8:12], "little")
        index, at = json.loads(zlib.decompress(patch[16 : 16 + size])), 16 + size
        for entry in index["tensors"]:
            if "of" in entry:
                same[entry["name"]] = entry["of"]
                continue
            kind = PAIRS.get(entry["dtype"], entry["dtype"])
            width = FLOATS[kind][0] if kind in FLOATS else INTEGERS.get(kind, 1)
            shape = [*entry["shape"], 2] if entry["dtype"] in PAIRS else entry["shape"]
            whole = [entry["nbytes"]] if "nbytes" in entry else shape
            sizes, tensor = entry.get("sizes", whole), made.get(entry["name"])
            if tensor is None or tensor.shape != tuple(whole) or tensor.itemsize != width:
                tensor = np.zeros(whole, f"u{width}")
            made[entry["name"]] = tensor = tensor.copy()
            for length, box in zip(entry.get("frames", []), frames(sizes)):
                frame, at = patch[at : at + length], at + length
                first = entry.get("offsets", [0] * len(whole))
                place = tuple(slice(o + a, o + a + n) for o, (a, n) in zip(first, box))
                if frame:
                    older = tensor[place] if entry.get("from_base") else np.zeros_like(tensor[place])
                    narrow = entry.get("narrow", kind)
                    to_width, counted = FLOATS.get(narrow, (width, False))
                    values = update(frame, converted(older.reshape(-1), to_width, narrow == "BF16"), counted)
                    tensor[place] = converted(values, width, narrow == "BF16").reshape(older.shape)
        made = {name: tensor for name, tensor in made.items() if name not in index.get("gone", [])}
    return made | {name: made[other] for name, other in same.items()}


def frames(sizes: list[int]):
    """(offset, size) in each dimension, of each frame of a part."""
    cut, behind = len(sizes) - 1, 1
    while cut > 0 and behind * sizes[cut] <= FRAME:
        behind, cut = behind * sizes[cut], cut - 1
    if not sizes or not all(sizes):
        return [] if sizes else [()]
    length = math.ceil(sizes[cut] / math.ceil(sizes[cut] / (FRAME // behind)))
    rest = [(0, size) for size in sizes[cut + 1 :]]
    ranges = [(first, min(length, sizes[cut] - first)) for first in range(0, sizes[cut], length)]
    return [(*((i, 1) for i in index), part, *rest) for *index, part in product(*map(range, sizes[:cut]), ranges)]


def converted(x: np.ndarray, width: int, is_bf16: bool) -> np.ndarray:
    """Floats of another width, which has their values."""
    if is_bf16 and width != x.itemsize:
        return (x >> 16).astype("u2") if width == 2 else x.astype("u4") << 16
    return x if width == x.itemsize else x.view(f"f{x.itemsize}").astype(f"f{width}").view(f"u{width}")


def update(frame: bytes, older: np.ndarray, counted: bool) -> np.ndarray:
    """The elements that a frame makes of older ones. `counted`: changes are numbers of floats."""
    width = older.itemsize
    if len(frame) == older.nbytes:
        return np.frombuffer(frame, f"u{width}")
    frame = zlib.decompress(frame) if frame[:1] == b"\x78" else frame
    if frame[5] != 4:
        assert counted
        top, all_but_top = 1 << 8 * width - 1, (1 << 8 * width - 1) - 1
        ordered = np.where(older & top, older ^ all_but_top, older) + codes(frame).astype(f"u{width}")
        return np.where(ordered & top, ordered ^ all_but_top, ordered).astype(f"u{width}")
    base, at = int.from_bytes(frame[24:28], "little"), 28
    planes, top_bits = (7, 16) if width == 8 else (width, 8)
    is_change, result = frame[6] == 1, np.zeros(len(older), f"u{width}")
    for plane in range(planes):
        if is_change and not base >> plane & 1:
            continue  # the plane is zero
        size = 24 + int.from_bytes(frame[at + 12 : at + 16], "little")
        values, at = codes(frame[at : at + size]).astype(f"u{width}"), at + size
        mask = (1 << (top_bits if plane == 0 else 8)) - 1
        values = values + np.array(0 if is_change or plane else base, f"u{width}") & mask
        result |= values << (8 * width - top_bits - 8 * plane)
    changed = (result.view("u1") + older.view("u1")).view(f"u{width}")
    return changed if is_change else result >> 1 | result << 8 * width - 1


def codes(frame: bytes) -> np.ndarray:
    """The codes of a frame, int32."""
    count, payload = int.from_bytes(frame[8:12], "little"), frame[24:]
    if frame[5] == 7:
        end, found = 24 + int.from_bytes(payload[12:16], "little"), np.zeros(count, "i4")
        found[np.cumsum(codes(payload[:end]) + np.int64(1)) - 1] = codes(payload[end:])
        return found
    if frame[5] == 0:
        symbols = np.frombuffer(payload, f"u{frame[7] // 8}").astype("u4")
    else:
        symbols = {1: fixed, 2: huffman, 3: rans}[frame[5]](payload, count)
    found = symbols >> 1 ^ np.where(symbols & 1, 0xFFFFFFFF, 0).astype("u4")
    if frame[6] == 1:
        for first in range(0, count, CHUNK):
            found[first : first + CHUNK] = np.cumsum(found[first : first + CHUNK], dtype="u4")
    return found.view("i4")


def fixed(payload: bytes, count: int) -> np.ndarray:
    found, at = [], 2 * math.ceil(count / CHUNK)
    for first in range(0, count, CHUNK):
        left = min(CHUNK, count - first)
        widths, at = payload[at : at + math.ceil(left / 32)], at + math.ceil(left / 32)
        for number, w in enumerate(widths):
            octets = math.ceil(min(32, left - 32 * number) / 8)
            bits = np.unpackbits(np.frombuffer(payload[at : at + w * octets], "u1"), bitorder="little")
            at += w * octets
            values = bits.reshape(8 * octets, w).astype("u8") @ (1 << np.arange(w, dtype="u8"))
            found.append(values[: left - 32 * number])
    return np.concatenate(found).astype("u4")


class Bits:
    def __init__(self, data: bytes):
        self.rest = int.from_bytes(data, "little")

    def take(self, count: int) -> int:
        value, self.rest = self.rest & (1 << count) - 1, self.rest >> count
        return value


def symbol_of(token: int, bits: Bits) -> int:
    """The symbol of a token, whose extra bits come next."""
    if token < 128:
        return token
    e, rest = 7 + (token - 128) // 4, (token - 128) % 4
    return 1 << e | (rest >> 1) << e - 1 | bits.take(e - 2) << 1 | rest & 1


def huffman(payload: bytes, count: int) -> np.ndarray:
    lengths = [payload[1 + t // 2] >> 4 * (t % 2) & 15 for t in range(payload[0])]
    table, code, before = {}, 0, 0
    for length, token in sorted((length, token) for token, length in enumerate(lengths) if length):
        code, before = code << length - before, length
        table[length, code] = token
        code += 1
    at, chunks = 1 + math.ceil(payload[0] / 2), math.ceil(count / CHUNK)
    lanes = np.frombuffer(payload[at : at + 8 * chunks], "<u2").astype(int)
    at, found = at + 8 * chunks, np.zeros(chunks * CHUNK, "u4")
    for number, size in enumerate(lanes):
        bits, at = Bits(payload[at : at + size]), at + size
        first = number // 4 * CHUNK
        for i in range(first + number % 4, min(count, first + CHUNK), 4):
            length, code = 0, 0
            while (length, code) not in table:
                length, code = length + 1, code << 1 | bits.take(1)
            found[i] = symbol_of(table[length, code], bits)
    return found[:count]


def rans(payload: bytes, count: int) -> np.ndarray:
    mode, at, tables = payload[0], 1, []
    for _ in range(2):
        values = np.flatnonzero(np.unpackbits(np.frombuffer(payload[at : at + 32], "u1"), bitorder="little"))
        at += 32
        frequencies = np.frombuffer(payload[at : at + 2 * len(values)], "<u2").astype(int)
        at += 2 * len(values)
        tables.append((values, frequencies, np.cumsum(frequencies) - frequencies))
    pages, found = math.ceil(count / PAGE), np.full(count, mode, "u4")
    heads = np.frombuffer(payload[at : at + 4 * pages], "<u2").astype(int)
    at += 4 * pages
    for page in range(pages):
        words, extra = heads[2 * page : 2 * page + 2]
        states = np.frombuffer(payload[at : at + 16], "<u4").astype(int).tolist()
        stream = iter(np.frombuffer(payload[at + 16 : at + 16 + 2 * words], "<u2").astype(int).tolist())
        bits, at = Bits(payload[at + 16 + 2 * words :][:extra]), at + 16 + 2 * words + extra
        first, left = page * PAGE, min(PAGE, count - page * PAGE)
        masks = [rans_value(tables[0], states, i % 4, stream) for i in range(math.ceil(left / 8))]
        places = [first + 8 * i + k for i, mask in enumerate(masks) for k in range(8) if mask >> k & 1]
        for j, place in enumerate(places):
            found[place] = symbol_of(rans_value(tables[1], states, j % 4, stream), bits)
    return found


def rans_value(table: tuple, states: list[int], lane: int, stream: Iterator[int]) -> int:
    (values, frequencies, sums), x = table, states[lane]
    which = int(np.searchsorted(sums, x % 4096, "right")) - 1
    x = int(frequencies[which]) * (x // 4096) + x % 4096 - int(sums[which])
    states[lane] = x if x >= 65536 else 65536 * x + next(stream)
    return int(values[which])
