"""Elements that a receiver has an older version of, coded without loss.

Changes of floats of 16 and 32 bits are counted in floats: how far each moved. All other dtypes (float64, integers,
floats of 8 bits) change byte by byte. Where the elements themselves (SPLIT, see lossless.py) take fewer bytes, a frame
holds those. Shapes are those of backend.py; dtypes are any of 1, 2, 4 or 8 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import Backend
from .format import HEADER, HEADER_BYTES, Coder, Coding, max_frame_bytes
from .lossless import decode_floats, encode_byte_changes, encode_floats, max_lossless_bytes
from .scratch import Scratch

# SPLIT saves a quarter of bfloat16 weights, and less of others: smaller frames of differences need no comparison.
_SURELY_SMALLER = 3 / 4
_COUNTED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose changes are counted in floats

_scratch = Scratch()


def max_update_bytes(count: int, itemsize: int) -> int:
    """An upper bound of the bytes of a frame of `count` elements of `itemsize` bytes."""
    return max(max_lossless_bytes(count, itemsize), max_frame_bytes(count))


def encode_update(backend: Backend, x: Tensor, base: Tensor | None, coding: Coding, frame: Tensor) -> int:
    """Write `x` as one frame to `frame` (uint8, `max_update_bytes` long). Returns the bytes written.

    Without a `base` the elements themselves are written.
    """
    if base is None:
        return encode_floats(backend, x, coding, frame)
    if x.dtype in _COUNTED:
        codes = _scratch.of("differences", x.numel(), torch.int32, x.device)
        backend.differences(x, base, codes)
        size = int(backend.encode_codes(codes, coding, frame))
    else:
        size = encode_byte_changes(backend, x, base, coding, frame)
    if size <= _SURELY_SMALLER * x.nbytes:
        return size
    whole = _scratch.of("whole", max_lossless_bytes(x.numel(), x.element_size()), torch.uint8, x.device)
    whole_size = encode_floats(backend, x, coding, whole)
    if whole_size < size:
        frame[:whole_size] = whole[:whole_size]
        return whole_size
    return size


def decode_update(backend: Backend, frame: Tensor, base: Tensor | None, out: Tensor) -> None:
    """Read one frame into `out`, which may be `base`. Without a `base` only the elements themselves can be read.

    Raises DamagedFrame unless every byte is valid. `out` is unchanged then.
    """
    if base is None or out.dtype not in _COUNTED or _is_split(frame):
        return decode_floats(backend, frame, out, base)
    codes = _scratch.of("differences", out.numel(), torch.int32, out.device)
    backend.decode_codes(frame, codes)
    backend.check()
    backend.add_differences(codes, base, out)


def _is_split(frame: Tensor) -> bool:
    """Whether a frame is a SPLIT frame. On a GPU the host waits."""
    if frame.numel() < HEADER_BYTES:
        return False
    _, _, coder, *_ = HEADER.unpack(frame[:HEADER_BYTES].cpu().numpy())
    return coder == Coder.SPLIT
