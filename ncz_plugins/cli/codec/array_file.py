"""Reader of arrays of floats from .npy files."""

from __future__ import annotations

import io
import os
import stat

import numpy as np

from ...core.errors import UnsupportedError

DTYPES = ("float16", "float32", "float64")
_MAGIC = b"\x93NUMPY"


def read_array(file: str | os.PathLike) -> np.ndarray:
    """Read float16, float32 or float64 from an .npy file, memory-mapped if possible. Raises UnsupportedError."""
    try:
        with open(file, "rb") as opened:
            is_plain = stat.S_ISREG(os.fstat(opened.fileno()).st_mode)
            data = opened.read(len(_MAGIC) if is_plain else -1)  # a FIFO can be neither mapped nor reopened
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be read: {error.strerror or error}") from None
    if not data.startswith(_MAGIC):
        raise UnsupportedError(f"{file}: is not an .npy file")
    try:
        if is_plain:
            array = np.load(file, mmap_mode="c", allow_pickle=False)  # copy on write: torch wants writable memory
        else:
            array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a damaged header makes numpy raise many kinds of errors
        raise UnsupportedError(f"{file}: is not a whole .npy file of numbers: {error}") from None
    native = array.dtype.newbyteorder("=")
    if native.name not in DTYPES:
        raise UnsupportedError(f"{file}: holds {array.dtype}; allowed: {', '.join(DTYPES)}")
    return np.ascontiguousarray(array, dtype=native).reshape(array.shape)
