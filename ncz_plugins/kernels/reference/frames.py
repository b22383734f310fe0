"""Frames: a header, and codes as one of the coders writes them."""

from __future__ import annotations

import numpy as np

from ..format import (
    GAPPED,
    HAS_CHECKSUM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    ON_CPUS_ALONE,
    ON_GPUS,
    SPOILED,
    VERSION,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
)
from ..ieee import ieee
from . import fixed, huffman, huffman32, planes, rans
from .select import select
from .symbols import predict, unpredict


def encode_codes(codes: np.ndarray, coding: Coding, on_gpus: bool = False) -> bytes:
    """One frame that holds `codes` (int32).

    Args:
        on_gpus: whether to use the coders of GPUs, see format.ON_GPUS.
    """
    coder, predictor, sampled = select(codes, coding, on_gpus)
    symbols = predict(codes, predictor)
    payload = None
    if coder == Coder.FIXED:
        payload = fixed.encode_fixed(symbols)
    elif coder == Coder.HUFFMAN:
        payload = huffman.encode(symbols)
    elif coder == Coder.HUFFMAN32:
        payload = huffman32.encode(symbols, huffman32.lengths_of(sampled.counts), sampled.is_gapped)
    elif coder == Coder.RANS:
        payload = rans.encode(symbols, sampled.mode)
    # RAW, and on GPUs PLANES, replaces a coder whose payload turned out larger.
    if on_gpus and (payload is None or len(payload) > symbols.size):
        coder, payload = Coder.PLANES, planes.encode(codes, predictor)
    elif not on_gpus and coder != Coder.FIXED:
        raw = fixed.encode_raw(symbols)
        if coder == Coder.RAW or len(payload) > len(raw):
            coder, payload = Coder.RAW, raw
    width = fixed.raw_bits(symbols) if coder == Coder.RAW else 0
    if coder == Coder.HUFFMAN32 and sampled.is_gapped:
        width = GAPPED
    return HEADER.pack(MAGIC, VERSION, coder, predictor, width, codes.size, len(payload), 0, 0) + payload


def decode_codes(frame: bytes, count: int, on_gpus: bool = False) -> np.ndarray:
    """Codes (int32) of one frame that must hold `count` of them. Raises DamagedFrame unless every byte is valid.

    Args:
        on_gpus: see `encode_codes`.
    """
    if len(frame) < HEADER_BYTES:
        raise DamagedFrame(f"{len(frame)} bytes are too few for a frame header of {HEADER_BYTES}")
    magic, version, coder, predictor, width, stored, payload_bytes, flags, stored_sum = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise DamagedFrame(f"magic is {magic:#010x}, not {MAGIC:#010x}: not a frame")
    if version != VERSION:
        raise DamagedFrame(f"frame version is {version}; this build reads version {VERSION}")
    if flags == SPOILED:
        raise DamagedFrame(
            "it was made of a frame that was damaged; the rank that received that frame says what is wrong"
        )
    if flags not in (0, HAS_CHECKSUM) or (not flags and stored_sum):
        raise DamagedFrame(f"header has unknown flags {flags:#x}, or a checksum ({stored_sum:#x}) without its flag")
    if predictor not in (Predictor.NONE, Predictor.DELTA):
        raise DamagedFrame(f"predictor {predictor} is unknown")
    if stored != count:
        raise DamagedFrame(f"frame holds {stored} codes, expected {count}")
    if payload_bytes != len(frame) - HEADER_BYTES:
        raise DamagedFrame(f"payload has {len(frame) - HEADER_BYTES} bytes, the header says {payload_bytes}")
    if flags and (actual := checksum(frame)) != stored_sum:
        raise DamagedFrame(f"checksum is {actual:#010x}, the header says {stored_sum:#010x}")
    payload = np.frombuffer(frame, dtype=np.uint8, offset=HEADER_BYTES)
    is_known = coder not in (ON_CPUS_ALONE if on_gpus else ON_GPUS.values())
    if is_known and coder == Coder.RAW and width in (8, 16, 32):
        return unpredict(fixed.decode_raw(payload, count, width), predictor)
    if is_known and coder == Coder.PLANES and width == 0:
        return planes.decode(payload, count, predictor)
    if is_known and coder == Coder.HUFFMAN32 and width in (0, GAPPED):
        return unpredict(huffman32.decode(payload, count, width == GAPPED), predictor)
    if not is_known or coder not in _DECODERS or width:
        raise DamagedFrame(f"coder {coder} with width {width} is unknown: damaged, or of a newer ncz_plugins")
    return unpredict(_DECODERS[coder](payload, count), predictor)


_DECODERS = {  # functions from payloads to symbols
    Coder.FIXED: fixed.decode_fixed,
    Coder.HUFFMAN: huffman.decode,
    Coder.RANS: rans.decode,
}


@ieee
def checksum(frame: bytes) -> int:
    """Checksum of a whole frame, without its checksum field."""
    data = np.zeros(-(-len(frame) // 4) * 4, dtype=np.uint8)
    data[: len(frame)] = np.frombuffer(frame, dtype=np.uint8)
    data[HEADER_BYTES - 4 : HEADER_BYTES] = 0
    words = data.view("<u4")
    keys = (2 * np.arange(words.size, dtype=np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B1)
    v = (words ^ words >> np.uint32(16)) * keys
    return int((v ^ v >> np.uint32(15)).sum(dtype=np.uint32))
