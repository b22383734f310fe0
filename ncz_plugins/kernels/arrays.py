"""Arrays that kernels take: torch tensors, and numpy arrays in host memory, which need no torch.

Importing torch takes longer than coding a gigabyte, so what codes files works on numpy arrays, by the same functions.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    Array: TypeAlias = Tensor | np.ndarray

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # numpy has no such dtype: this one holds the bits


class _Names(dict):
    """Names of dtypes of torch and of numpy, which are the same, such as "float32". A name is its own name."""

    def __missing__(self, dtype: Any) -> str:
        return self.setdefault(dtype, str(dtype).removeprefix("torch."))


NAMES = _Names({BFLOAT16: "bfloat16"})


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of this name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def namespace(array: Array) -> ModuleType:
    """numpy or torch, whichever made this array. Of both, call only what both have alike."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def device_of(array: Array) -> Any:
    """The device of a tensor; None: a numpy array."""
    return None if isinstance(array, np.ndarray) else array.device


def is_on_host(array: Array) -> bool:
    return isinstance(array, np.ndarray) or array.is_cpu


def empty(count: int, name: str, device: Any = None) -> Array:
    """Uninitialised memory for elements of the dtype `name`. `device`: see `device_of`."""
    if device is None:
        return np.empty(count, numpy_dtype(name))
    import torch  # whoever has a device has imported it

    return torch.empty(count, dtype=getattr(torch, name), device=device)


def viewed(array: Array, name: str) -> Array:
    """The same memory as elements of the dtype `name`."""
    return array.view(numpy_dtype(name) if isinstance(array, np.ndarray) else getattr(namespace(array), name))


def numpy_of(array: Array) -> np.ndarray:
    """The same memory as a numpy array. A tensor lies in host memory."""
    if isinstance(array, np.ndarray):
        return array
    name = NAMES[array.dtype]
    return viewed(array, "int16").numpy().view(BFLOAT16) if name == "bfloat16" else array.numpy()


def bytes_of(array: Array) -> bytes:
    """A copy of the bytes of an array, also of one on a GPU."""
    if not isinstance(array, np.ndarray):
        array = viewed(array.cpu(), "uint8").numpy()
    return array.tobytes()


def put(data: bytes, into: Array) -> None:
    """Copy bytes into as many elements, uint8."""
    xp = namespace(into)
    into[:] = xp.frombuffer(bytearray(data), dtype=xp.uint8)
