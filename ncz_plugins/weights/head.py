"""The first bytes of a patch, which say what it is."""

from __future__ import annotations

import struct

from ..core.errors import FrameError

HEAD = struct.Struct("<IIII")  # magic, format, bytes of the index, CRC-32 of the index
MAGIC, FORMAT = 0x505A434E, 3  # "NCZP", little endian
FORMAT_WITH_TAG = 4  # the same, followed by a keyed checksum, see keys.py


def format_of(patch: memoryview) -> int:
    """The format that a patch's head names. Raises FrameError if this is not a patch, or has another format."""
    if len(patch) < HEAD.size:
        raise FrameError(f"{len(patch)} bytes are too few for a patch")
    magic, version, *_ = HEAD.unpack_from(patch)
    if magic != MAGIC:
        raise FrameError(f"magic is {magic:#010x}, not {MAGIC:#010x}: not a patch")
    if version not in (FORMAT, FORMAT_WITH_TAG):
        raise FrameError(f"the patch has format {version}; this build reads formats {FORMAT} and {FORMAT_WITH_TAG}")
    return version
