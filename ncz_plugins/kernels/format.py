"""The layout of a frame, as constants: everything that all kernels must agree on.

docs/wire-format.md explains the format; `reference.py` is its executable specification.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import torch

MAGIC = 0x465A434E  # "NCZF", little endian
VERSION = 1
# magic, version, coder, predictor, width, count, payload bytes, flags, checksum
HEADER = struct.Struct("<IBBBBIIII")
HEADER_BYTES = HEADER.size

CHUNK = 4096  # elements that are coded together: delta restarts, and one step holds, per chunk
BLOCK = 32  # symbols that share one width byte in FIXED
OCTET = 8  # symbols that are packed together; a short last block is padded to whole octets
SAMPLE_CHUNKS = 4  # chunks the selector looks at: at most 64 KiB of float32
LANES = 128  # partial sums per chunk, so that every backend adds squares in the same order

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Coder(IntEnum):
    """How the symbols of a frame are written; AUTO is a request and never stands in a frame."""

    RAW = 0
    FIXED = 1
    AUTO = 255


class Predictor(IntEnum):
    """What is subtracted from each code before coding; AUTO never stands in a frame."""

    NONE = 0
    DELTA = 1
    AUTO = 255


class DamagedFrame(ValueError):
    """The bytes are not a whole, valid frame of the expected number of codes."""


def chunks_of(count: int) -> int:
    """Number of chunks that `count` elements fill, the last one perhaps in part."""
    return -(-count // CHUNK)


def max_frame_bytes(count: int) -> int:
    """Bytes that any frame of `count` codes fits in, whatever their values."""
    octets = -(-count // OCTET)
    return HEADER_BYTES + 2 * chunks_of(count) + -(-count // BLOCK) + 4 * OCTET * octets
