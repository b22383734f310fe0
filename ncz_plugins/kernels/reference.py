"""The executable specification of every kernel, in numpy.

Slow and plain on purpose: the C++ and CUDA kernels must produce the same bytes. Where no compiled
library loads, this is what runs. The arrays here are numpy's; `ReferenceBackend` at the end wraps
torch tensors. bfloat16, which numpy lacks, is widened to float32 (exactly) before anything else.
"""

from __future__ import annotations

import numpy as np
import torch

from .backend import Backend
from .format import (
    BLOCK,
    CHUNK,
    HEADER,
    HEADER_BYTES,
    LANES,
    MAGIC,
    OCTET,
    SAMPLE_CHUNKS,
    VERSION,
    Coder,
    DamagedFrame,
    Predictor,
    chunks_of,
    max_frame_bytes,
)

# ------------------------------------------------------------------ statistics


def chunk_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest magnitude and sum of squares of each chunk of `x` (float32 or float64).

    Both float64, shape [chunks]; +inf where a chunk holds a NaN or an infinity. The squares are
    added in LANES partial sums (element i to sum i mod LANES), then by halving, so that the result
    does not depend on the backend.
    """
    chunks = chunks_of(x.size)
    padded = np.zeros(chunks * CHUNK, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        padded[: x.size] = x
    rows = padded.reshape(chunks, CHUNK // LANES, LANES)
    finite = np.isfinite(padded).reshape(chunks, CHUNK).all(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.zeros((chunks, LANES))
        for row in range(CHUNK // LANES):
            sums = sums + rows[:, row] * rows[:, row]
        width = LANES // 2
        while width:
            sums = sums[:, :width] + sums[:, width:]
            width //= 2
        absmax = np.abs(padded).reshape(chunks, CHUNK).max(axis=1, initial=0.0)
    return np.where(finite, absmax, np.inf), np.where(finite, sums[:, 0], np.inf)


# ------------------------------------------------------------------ codes


def quantize(x: np.ndarray, inverse_steps: np.ndarray) -> np.ndarray:
    """`rint(x / step)` as int32: one multiplication in the dtype of `x`, clamped, then rounded to even.

    `inverse_steps` holds 1/step per chunk in the dtype of `x`. NaN becomes the upper clamp: callers
    that must keep NaN look at `chunk_statistics` first.
    """
    limit = x.dtype.type(2147483520.0 if x.dtype == np.float32 else 2147483647.0)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * _per_element(inverse_steps, x.size)
        scaled = np.where(scaled < limit, scaled, limit)
        scaled = np.where(scaled > -limit, scaled, -limit)
    return np.rint(scaled).astype(np.int32)


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`code * scale` in the dtype of `scales` (float32 or float64), one scale per chunk."""
    with np.errstate(over="ignore"):
        return codes.astype(scales.dtype) * _per_element(scales, codes.size)


def predict(codes: np.ndarray, predictor: int) -> np.ndarray:
    """Zigzag of the residuals (uint32): small magnitudes of either sign become small numbers."""
    if predictor == Predictor.DELTA:
        previous = np.roll(codes, 1)
        previous[::CHUNK] = 0
        codes = codes - previous  # wraps modulo 2**32, as does its inverse
    return (codes.view(np.uint32) << np.uint32(1)) ^ (codes >> 31).view(np.uint32)


def unpredict(symbols: np.ndarray, predictor: int) -> np.ndarray:
    """Inverse of `predict`."""
    codes = ((symbols >> np.uint32(1)) ^ (~(symbols & np.uint32(1)) + np.uint32(1))).view(np.int32)
    if predictor == Predictor.DELTA:
        padded = np.zeros(chunks_of(codes.size) * CHUNK, dtype=np.int32)
        padded[: codes.size] = codes
        sums = np.cumsum(padded.reshape(-1, CHUNK), axis=1, dtype=np.int32)
        codes = sums.reshape(-1)[: codes.size]
    return codes


# ------------------------------------------------------------------ frames


def encode_codes(codes: np.ndarray, coder: int, predictor: int) -> bytes:
    """One frame that holds `codes` (int32). AUTO lets `select` choose."""
    coder, predictor = select(codes, coder, predictor)
    symbols = predict(codes, predictor)
    if coder == Coder.RAW:
        width = _raw_bits(symbols)
        payload = symbols.astype(f"<u{width // 8}").tobytes()
    else:
        width = 0
        chunks = [_pack_fixed(symbols[i : i + CHUNK]) for i in range(0, symbols.size, CHUNK)]
        payload = np.array([len(c) for c in chunks], dtype="<u2").tobytes() + b"".join(chunks)
    return HEADER.pack(MAGIC, VERSION, coder, predictor, width, codes.size, len(payload), 0, 0) + payload


def decode_codes(frame: bytes, count: int) -> np.ndarray:
    """The `count` codes (int32) of one frame; DamagedFrame unless it is valid to the last byte."""
    if len(frame) < HEADER_BYTES:
        raise DamagedFrame(f"{len(frame)} bytes are too few for a frame header of {HEADER_BYTES}")
    magic, version, coder, predictor, width, stored, payload_bytes, flags, checksum = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise DamagedFrame(f"magic is {magic:#010x}, not {MAGIC:#010x}: not a frame")
    if version != VERSION:
        raise DamagedFrame(f"frame version is {version}; this build reads version {VERSION}")
    if flags or checksum:
        raise DamagedFrame(f"reserved header fields are {flags:#x} and {checksum:#x}, not 0")
    if predictor not in (Predictor.NONE, Predictor.DELTA):
        raise DamagedFrame(f"predictor {predictor} is unknown")
    if stored != count:
        raise DamagedFrame(f"frame holds {stored} codes, expected {count}")
    if payload_bytes != len(frame) - HEADER_BYTES:
        raise DamagedFrame(f"payload has {len(frame) - HEADER_BYTES} bytes, the header says {payload_bytes}")
    payload = np.frombuffer(frame, dtype=np.uint8, offset=HEADER_BYTES)
    if coder == Coder.RAW and width in (8, 16, 32):
        if payload.size != count * width // 8:
            raise DamagedFrame(f"RAW payload has {payload.size} bytes for {count} symbols of {width} bits")
        symbols = payload.view(f"<u{width // 8}").astype(np.uint32)
    elif coder == Coder.FIXED and width == 0:
        symbols = _unpack_chunks(payload, count)
    else:
        raise DamagedFrame(f"coder {coder} with width {width} is unknown")
    return unpredict(symbols, predictor)


def select(codes: np.ndarray, coder: int, predictor: int) -> tuple[int, int]:
    """Resolve AUTO: the pair of the allowed ones that takes fewest bytes on a sample of the frame.

    The sample is SAMPLE_CHUNKS chunks at even distances, the first and the last among them. At a
    draw the earlier of (FIXED, NONE), (FIXED, DELTA), (RAW, NONE), (RAW, DELTA) wins.
    """
    coders = (Coder.FIXED, Coder.RAW) if coder == Coder.AUTO else (Coder(coder),)
    predictors = (Predictor.NONE, Predictor.DELTA) if predictor == Predictor.AUTO else (Predictor(predictor),)
    chunks = chunks_of(codes.size)
    if chunks <= SAMPLE_CHUNKS:
        sample = range(chunks)
    else:
        sample = [i * (chunks - 1) // (SAMPLE_CHUNKS - 1) for i in range(SAMPLE_CHUNKS)]
    symbols = {p: [predict(codes[c * CHUNK : (c + 1) * CHUNK], p) for c in sample] for p in predictors}
    costs = {}
    for c in coders:
        for p in predictors:
            if c == Coder.FIXED:
                costs[c, p] = sum(_fixed_bytes(s) for s in symbols[p])
            else:
                bits = max((_raw_bits(s) for s in symbols[p]), default=8)
                costs[c, p] = sum(s.size for s in symbols[p]) * bits // 8
    return min(costs, key=costs.get)  # the first of equals


def _raw_bits(symbols: np.ndarray) -> int:
    largest = int(symbols.max(initial=0))
    return 8 if largest < 1 << 8 else 16 if largest < 1 << 16 else 32


def _widths(symbols: np.ndarray) -> np.ndarray:
    """Bits of the largest symbol in each block of one chunk."""
    blocks = np.zeros((-(-symbols.size // BLOCK), BLOCK), dtype=np.uint32)
    blocks.reshape(-1)[: symbols.size] = symbols
    _, exponents = np.frexp(blocks.max(axis=1, initial=0).astype(np.float64))
    return exponents.astype(np.uint8)


def _octet_widths(widths: np.ndarray, count: int) -> np.ndarray:
    """Bytes of each octet of a chunk of `count` symbols: 8 symbols of `width` bits are `width` bytes."""
    return np.repeat(widths.astype(np.int64), BLOCK // OCTET)[: -(-count // OCTET)]


def _fixed_bytes(symbols: np.ndarray) -> int:
    widths = _widths(symbols)
    return int(widths.size + _octet_widths(widths, symbols.size).sum())


def _pack_fixed(symbols: np.ndarray) -> bytes:
    """Width bytes of the chunk's blocks, then octet by octet 8 symbols as one little-endian bit string."""
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


def _unpack_chunks(payload: np.ndarray, count: int) -> np.ndarray:
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
        part[:] = _unpack_fixed(payload[ends[c] - sizes[c] : ends[c]], part.size)
    return symbols


def _unpack_fixed(chunk: np.ndarray, count: int) -> np.ndarray:
    blocks = -(-count // BLOCK)
    widths = chunk[:blocks]
    if widths.size < blocks or (widths > 32).any():
        raise DamagedFrame("FIXED chunk has a width over 32 or too few width bytes")
    sizes = _octet_widths(widths, count)
    packed = chunk[blocks:]
    if int(sizes.sum()) != packed.size:
        raise DamagedFrame(f"FIXED chunk has {chunk.size} bytes, its widths ask for another number")
    starts = np.cumsum(sizes) - sizes
    octets = np.empty((sizes.size, OCTET), dtype=np.uint32)
    for width in np.unique(sizes):
        rows = sizes == width
        data = packed[starts[rows][:, None] + np.arange(width)]
        bits = np.unpackbits(data.reshape(-1), bitorder="little").reshape(rows.sum(), OCTET, width)
        octets[rows] = (bits.astype(np.uint32) << np.arange(width, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return octets.reshape(-1)[:count]


def _per_element(per_chunk: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(per_chunk, CHUNK)[:count]


# ------------------------------------------------------------------ on torch tensors


class ReferenceBackend(Backend):
    """The numpy kernels behind the interface that all backends share."""

    name = "reference"

    def chunk_statistics(self, x):
        absmax, squares = chunk_statistics(_values(x))
        return torch.from_numpy(absmax), torch.from_numpy(squares)

    def quantize(self, x, inverse_steps, codes):
        codes.copy_(torch.from_numpy(quantize(_values(x), inverse_steps.numpy())))

    def dequantize(self, codes, scales, out):
        out.copy_(torch.from_numpy(dequantize(codes.numpy(), scales.numpy())))

    def encode_codes(self, codes, coder, predictor, frame):
        data = encode_codes(codes.numpy(), coder, predictor)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return len(data)

    def decode_codes(self, frame, codes, add=False):
        decoded = torch.from_numpy(decode_codes(frame.numpy().tobytes(), codes.numel()))
        codes.add_(decoded) if add else codes.copy_(decoded)

    def encode(self, x, inverse_steps, coder, predictor, frame):
        codes = torch.empty(x.numel(), dtype=torch.int32)
        self.quantize(x, inverse_steps, codes)
        return self.encode_codes(codes, coder, predictor, frame)

    def decode(self, frame, scales, out):
        codes = torch.empty(out.numel(), dtype=torch.int32)
        self.decode_codes(frame, codes)
        self.dequantize(codes, scales, out)

    def reduce(self, frame, x, inverse_steps, coder, predictor, out):
        codes = torch.empty(x.numel(), dtype=torch.int32)
        self.quantize(x, inverse_steps, codes)
        self.decode_codes(frame, codes, add=True)
        return self.encode_codes(codes, coder, predictor, out)


def _values(x: torch.Tensor) -> np.ndarray:
    """As float32, or float64 where the tensor is; the widening of the half types is exact."""
    return x.numpy() if x.dtype == torch.float64 else x.to(torch.float32).numpy()


__all__ = [
    "ReferenceBackend", "chunk_statistics", "decode_codes", "dequantize", "encode_codes", "max_frame_bytes",
    "predict", "quantize", "select", "unpredict",
]  # fmt: skip
