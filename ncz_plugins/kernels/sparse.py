"""Frames of rare changes: the SPARSE frames of docs/reference/wire-format.md, which consist of two frames of codes.

A SPARSE frame holds where codes are not 0, and those codes. Writing and reading one touches little else, so that where
few elements change it takes less time than RANS of all codes, and fewer bytes: RANS takes 20 for each page of 16,384
codes. FIXED takes more bytes and less time, so that on fast links SPARSE does not pay. For host memory; shapes are
those of backend.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arrays import numpy_of, put
from .format import CHUNK, HEADER, HEADER_BYTES, MAGIC, OCTET, VERSION, Coder, Coding, DamagedFrame, Predictor
from .lossless import check_header, next_frame
from .scratch import Scratch

if TYPE_CHECKING:
    import numpy as np

    from .arrays import Array
    from .backend import HostBackend

_LEAST_CODES = CHUNK  # of a frame: in shorter ones two more headers are too many
# Most codes that are not 0, for links of this many picoseconds per byte and more: up to 160 Mbit/s, and 1.6 Gbit/s,
# so that 1 Gbit/s is among them. On faster links coders of all codes take less time.
_MAX_SHARES = ((50_000, 1 / 4), (5_000, 1 / 32))

_scratch = Scratch()


def encode_sparse(backend: HostBackend, x: Array, base: Array, coding: Coding, frame: Array) -> int:
    """Write what changes from `base` to `x` as a SPARSE frame. Returns the bytes written.

    0 if it would not pay, or if `coding` says a coder. `frame` is uint8, at least `max_frame_bytes(len(x))` long.
    """
    count, max_share = len(x), next((share for link, share in _MAX_SHARES if coding.costs.link >= link), 0)
    if coding.coder != Coder.AUTO or not max_share or count < _LEAST_CODES:
        return 0
    most = int(max_share * count)
    gaps, codes = _scratch.of("gaps", count + OCTET, "int32"), _scratch.of("codes", most, "int32")
    changes = backend.rare_differences(x, base, most, gaps, codes)
    if not 0 < changes <= most:
        return 0
    frame, end = numpy_of(frame), HEADER_BYTES
    for part in (gaps, codes):
        end += int(backend.encode_codes(part[:changes], coding, frame[end:]))
    header = (MAGIC, VERSION, Coder.SPARSE, Predictor.NONE, 0, count, end - HEADER_BYTES, 0, 0)
    put(HEADER.pack(*header), frame[:HEADER_BYTES])
    return end


def decode_sparse(backend: HostBackend, frame: Array, base: Array, out: Array) -> None:
    """Change what a SPARSE frame of all codes changes in `base`, floats: `out`, which may be `base`.

    Raises DamagedFrame unless every byte is valid. `out` is unchanged then.
    """
    frame, count = numpy_of(frame), len(out)
    check_header(backend, frame, (Coder.SPARSE, Predictor.NONE, 0), count)
    parts = _parts(frame[HEADER_BYTES:])
    length = HEADER.unpack(parts[0][:HEADER_BYTES])[5]
    # Its header must not ask for more memory than the elements take.
    if length > count:
        raise DamagedFrame(f"SPARSE frame has {length} changes of {count} elements")
    read = _scratch.of("read", 2 * length, "int32").reshape(2, length)
    for part, codes in zip(parts, read):
        backend.decode_codes(part, codes)
    if not backend.add_rare_differences(*read, base, out):
        raise DamagedFrame(f"SPARSE frame has {_fault(read[1], count)}")


def _fault(changes: np.ndarray, count: int) -> str:
    """Why changes of `count` elements were refused."""
    if not len(changes):
        return "no changes"
    if not changes.all():
        return "zeros among its changes"
    return f"changes that do not lie in its {count} elements"


def _parts(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two frames that a SPARSE frame consists of. Raises DamagedFrame if there are more."""
    gaps, rest = next_frame(data)
    changes, rest = next_frame(rest)
    if len(rest):
        raise DamagedFrame(f"SPARSE frame goes on for {len(rest)} bytes behind its changes")
    return gaps, changes
