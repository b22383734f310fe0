"""The structures of common/format.h that kernels take by value."""

from __future__ import annotations

import ctypes
import functools

from ..format import Coding, Noise, Rows


class CodingArgument(ctypes.Structure):
    """ncz::Coding"""

    _fields_ = [("coder", ctypes.c_int32), ("predictor", ctypes.c_int32), ("costs", ctypes.c_int64 * 6)]


class NoiseArgument(ctypes.Structure):
    """ncz::Noise"""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("call", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("first", ctypes.c_uint64),
    ]


class RowsArgument(ctypes.Structure):
    """ncz::Rows"""

    _fields_ = [(name, ctypes.c_int64) for name in Rows._fields]


@functools.lru_cache(maxsize=64)
def coding_argument(coding: Coding) -> CodingArgument:
    return CodingArgument(coding.coder, coding.predictor, tuple(coding.costs))


def noise_argument(noise: Noise | None) -> NoiseArgument:
    """`noise` as a kernel's argument; zeros for None."""
    return NoiseArgument() if noise is None else NoiseArgument(*noise)
