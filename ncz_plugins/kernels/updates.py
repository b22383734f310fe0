"""Lossless coding of elements of which the receiver has an older version.

The change of a float of 16 or 32 bits is a number of floats: how far it moved. All other dtypes (float64, integers,
floats of 8 bits) change byte by byte. If the elements themselves take fewer bytes (SPLIT, see lossless.py), a frame
holds these. Shapes are those of backend.py. Elements have 1, 2, 4 or 8 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arrays import NAMES, bytes_of, device_of
from .backend import Backend, HostBackend
from .format import HEADER, HEADER_BYTES, Coder, Coding, max_frame_bytes
from .lossless import decode_floats, encode_byte_changes, encode_floats, max_lossless_bytes
from .scratch import Scratch
from .sparse import decode_sparse, encode_sparse

if TYPE_CHECKING:
    import numpy as np

    from .arrays import Array

# SPLIT takes three quarters of bfloat16 weights, and more of other dtypes. So don't try it if differences take less.
_MAX_SHARE_WITHOUT_SPLIT = 3 / 4
COUNTED = ("float32", "bfloat16", "float16")  # dtypes whose changes are numbers of floats

_scratch = Scratch()


def max_update_bytes(count: int, itemsize: int) -> int:
    """Upper bound of the bytes of a frame of `count` elements of `itemsize` bytes."""
    return max(max_lossless_bytes(count, itemsize), max_frame_bytes(count))


def encode_update(backend: Backend, x: Array, base: Array | None, coding: Coding, frame: Array) -> int:
    """Write `x` as one frame to `frame`: uint8, `max_update_bytes` long. Returns the bytes written.

    Without a `base`, the older version, the elements themselves are written.
    """
    if base is None:
        return encode_floats(backend, x, coding, frame)
    if NAMES[x.dtype] in COUNTED:
        size = _encode_differences(backend, x, base, coding, frame)
    else:
        size = encode_byte_changes(backend, x, base, coding, frame)
    if size <= _MAX_SHARE_WITHOUT_SPLIT * x.nbytes:
        return size
    whole = _scratch.of("whole", max_lossless_bytes(len(x), x.itemsize), "uint8", device_of(x))
    whole_size = encode_floats(backend, x, coding, whole)
    if whole_size < size:
        frame[:whole_size] = whole[:whole_size]
        return whole_size
    return size


def _encode_differences(backend: Backend, x: Array, base: Array, coding: Coding, frame: Array) -> int:
    if isinstance(backend, HostBackend):  # GPUs' kernels don't read SPARSE
        size = encode_sparse(backend, x, base, coding, frame)
        if size:
            return size
    codes = _scratch.of("differences", len(x), "int32", device_of(x))
    backend.differences(x, base, codes)
    return int(backend.encode_codes(codes, coding, frame))


def decode_update(
    backend: Backend, frame: Array, base: Array | None, out: Array, digests: np.ndarray | None = None
) -> None:
    """Read one frame into `out`, which may be `base`. Without a `base` only the elements themselves can be read.

    `digests`: see `HostBackend.decode_changes`.

    Raises DamagedFrame unless every byte is valid. `out` is unchanged then.
    """
    is_change = base is not None and NAMES[out.dtype] in COUNTED and isinstance(backend, HostBackend)
    if is_change and backend.decode_changes(frame, base, out, digests):
        return
    before = None if digests is None else backend.digest(base)
    _decode(backend, frame, base, out)
    if digests is not None:
        digests[:] = before, backend.digest(out)


def _decode(backend: Backend, frame: Array, base: Array | None, out: Array) -> None:
    """`decode_update` of any frame, which says what is wrong with it."""
    coder = _coder_of(frame)
    if base is None or NAMES[out.dtype] not in COUNTED or coder == Coder.SPLIT:
        return decode_floats(backend, frame, out, base)
    if coder == Coder.SPARSE and isinstance(backend, HostBackend):  # GPUs' kernels refuse it
        return decode_sparse(backend, frame, base, out)
    codes = _scratch.of("differences", len(out), "int32", device_of(out))
    backend.decode_codes(frame, codes)
    backend.check()
    backend.add_differences(codes, base, out)


def _coder_of(frame: Array) -> int | None:
    """The coder in a frame's header; None if it is cut off. On a GPU the host waits for the header."""
    if len(frame) < HEADER_BYTES:
        return None
    _, _, coder, *_ = HEADER.unpack(bytes_of(frame[:HEADER_BYTES]))
    return coder
