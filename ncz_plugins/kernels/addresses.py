"""Addresses of arrays for compiled kernels, checked: kernels trust what they are told about memory.

All other files of this package pass arrays on. Whoever needs an address asks here, says what the memory must hold, and
gets an error instead of a crash.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import NAMES
from .format import WrongTensor

if TYPE_CHECKING:
    from torch import Tensor

    from .arrays import Array


def host_address(array: Array, name: str, dtype: Any, length: int = 0) -> int:
    """Address of a contiguous array in host memory with at least `length` elements. Raises WrongTensor.

    `dtype` is one of torch or numpy, or its name. `length` 0 is for the array that says how long the others must be.
    The check takes about half a microsecond.
    """
    if NAMES[array.dtype] == NAMES[dtype]:
        if isinstance(array, np.ndarray):
            if array.flags.c_contiguous and array.size >= length:
                return address_of(array)
        elif array.is_cpu and array.is_contiguous() and (not length or array.numel() >= length):
            return array.data_ptr()
    raise wrong_tensor(array, name, dtype, length, "cpu")


def address_of(array: np.ndarray) -> int:
    """`array.ctypes.data`, which takes some microseconds, as does `__array_interface__`; this takes a tenth."""
    if array.size and array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.ctypes.data


def require(tensor: Tensor, name: str, dtype: Any, length: int) -> Tensor:
    """`tensor`, if it has this dtype and at least `length` elements. Raises WrongTensor.

    The launch that takes the tensor as its argument `name` checks that all its tensors are contiguous and on its
    device.
    """
    if tensor.dtype is dtype and tensor.numel() >= length:
        return tensor
    raise wrong_tensor(tensor, name, dtype, length, "the device of the launch")


def wrong_tensor(array: Array, name: str, dtype: Any, length: int, device: str) -> WrongTensor:
    """Error for an array that does not fit the argument `name` of a kernel."""
    if isinstance(array, np.ndarray):
        place, strides, count, is_row = "cpu", array.strides, array.size, array.flags.c_contiguous
    else:
        place, strides, count, is_row = array.device, array.stride(), array.numel(), array.is_contiguous()
    layout = "contiguous" if is_row else f"strided {strides}"
    return WrongTensor(
        f"{name} must be {NAMES[dtype]}, on {device}, contiguous, of at least {length} elements; got "
        f"{NAMES[array.dtype]}, on {place}, {layout}, of {count} elements"
    )
