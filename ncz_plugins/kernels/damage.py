"""Messages for the error codes of compiled kernels: the same messages that the reference raises.

A kernel that refuses a frame returns `-(cause + 256 * value)`. `ncz::Damage` in common/format.h lists the causes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .format import (
    HEADER,
    HEADER_BYTES,
    HUFFMAN32_PAGE,
    HUFFMAN_LANES,
    MAGIC,
    RANS_LANES,
    RANS_PAGE,
    VERSION,
    DamagedFrame,
    chunks_of,
    tiles_of,
)

_HEADER_FIELDS = "magic version coder predictor width stored payload_bytes flags checksum".split()
_MESSAGES = {  # by cause
    1: f"{{bytes}} bytes are too few for a frame header of {HEADER_BYTES}",
    2: f"magic is {{magic:#010x}}, not {MAGIC:#010x}: not a frame",
    3: f"frame version is {{version}}; this build reads version {VERSION}",
    4: "header has unknown flags {flags:#x}, or a checksum ({checksum:#x}) without its flag",
    5: "predictor {predictor} is unknown",
    6: "frame holds {stored} codes, expected {count}",
    7: "payload has {payload} bytes, the header says {payload_bytes}",
    8: "RAW payload has {payload} bytes for {count} symbols of {width} bits",
    9: "coder {coder} with width {width} is unknown: damaged, or of a newer ncz_plugins",
    10: "FIXED payload has {payload} bytes, fewer than its table of {table}",
    11: "chunk sizes add up to {value} bytes, the payload holds {chunk_bytes}",
    12: "FIXED chunk has a width over 32 or too few width bytes",
    13: "FIXED chunk has {value} bytes, its widths need another number",
    14: "checksum is {value:#010x}, the header says {checksum:#010x}",
    15: "HUFFMAN code has {value} lengths in a payload of {payload} bytes",
    16: "HUFFMAN code is not complete",
    17: "HUFFMAN payload has {value} bytes behind its code, its table of lanes takes {lane_table}",
    18: "lane sizes add up to {lane_bytes} bytes, the payload holds {lanes}",
    19: "a HUFFMAN lane does not end where it should",
    20: "RANS payload of {payload} bytes begins with mode {value}",
    21: "RANS payload is too short for its frequencies, or they are of unknown values",
    22: "RANS frequencies do not add up to the whole",
    23: "RANS payload has {value} bytes behind its frequencies, its pages' table takes more",
    24: "pages add up to {page_bytes} bytes, the payload holds {pages}",
    25: "a RANS page is not what its frequencies allow, or does not end where it should",
    26: "it was made of a frame that was damaged; the rank that received that frame says what is wrong",
    27: "it has no checksum, although entropy.checksum is on",
    28: "HUFFMAN32 payload has {value} bytes behind its code, its table of pages takes {pages32_table}",
    29: "pages do not add up to the {value} bytes that the payload holds",
    30: "a HUFFMAN32 page does not end where it should",
    31: "PLANES payload of {payload} bytes: its tables take {tiles_table}, and tiles whole words of 4 bytes",
    32: "tiles add up to {value} words, the payload holds {tile_words}",
    33: "a PLANES tile is not where it should be, or has other planes than its masks say",
}
NO_CHECKSUM = 27
_HUFFMAN_LANE_SUM, _RANS_PAGE_SUM = 18, 24  # their messages need a table of the frame
_WITHOUT_TABLE = {
    _HUFFMAN_LANE_SUM: "lane sizes do not add up to the {lanes} bytes that the payload holds",
    _RANS_PAGE_SUM: "pages do not add up to the {pages} bytes that the payload holds",
}


def error(
    result: int, header: bytes, frame_bytes: int, count: int, read: Callable[[int, int], bytes] | None = None
) -> DamagedFrame:
    """Exception for a frame that a kernel refused.

    Args:
        result: the kernel's result, below 0.
        header: the frame's first `HEADER_BYTES` bytes, or all it has.
        frame_bytes: size of the whole frame.
        count: number of codes that were expected.
        read: `read(first, size)` returns `size` bytes of the frame from byte `first` on. Without it, messages about the
            sum of a table don't state the sum.
    """
    value, cause = divmod(-result, 256)
    payload, pages = frame_bytes - HEADER_BYTES, -(-count // RANS_PAGE)
    chunk_table, lane_table, page_table = 2 * chunks_of(count), 2 * HUFFMAN_LANES * chunks_of(count), 4 * pages
    facts = dict(zip(_HEADER_FIELDS, HEADER.unpack(header.ljust(HEADER_BYTES, b"\0"))))
    facts |= dict(value=value, count=count, bytes=frame_bytes, payload=payload, table=chunk_table)
    facts |= dict(chunk_bytes=payload - chunk_table, lane_table=lane_table)
    facts |= dict(pages32_table=4 * -(-count // (2 * HUFFMAN32_PAGE)))
    tiles_table = 4 * (chunks_of(count) + tiles_of(count))
    facts |= dict(tiles_table=tiles_table, tile_words=(payload - tiles_table) // 4)
    facts |= dict(lanes=value - lane_table, pages=value - page_table)  # `value` includes the table
    if cause in _WITHOUT_TABLE and read is None:
        return DamagedFrame(_WITHOUT_TABLE[cause].format(**facts))
    if cause == _HUFFMAN_LANE_SUM:
        facts["lane_bytes"] = sum(_numbers(read(frame_bytes - value, lane_table)))
    elif cause == _RANS_PAGE_SUM:
        sizes = _numbers(read(frame_bytes - value, page_table))
        facts["page_bytes"] = 4 * RANS_LANES * pages + 2 * sum(sizes[::2]) + sum(sizes[1::2])
    return DamagedFrame(_MESSAGES[cause].format(**facts))


def _numbers(table: bytes) -> list[int]:
    return np.frombuffer(table, dtype="<u2").tolist()
