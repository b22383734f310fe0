"""What a caller passes: torch tensors, numpy arrays, CuPy arrays and any other array with `__dlpack__`.

`tensor_of` returns a tensor over the memory of an array, so results appear in the caller's own array. Nothing is copied
here: tensors and arrays that are not contiguous are copied when their call runs, see `Call.copy_strided`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UnsupportedError
from .runtime.device import has_memory
from .runtime.handle import Handle, Handles
from .runtime.inference_mode import ordinary

# Programs share arrays of these libraries and rely on their never changing, which DLPack does not say.
_IMMUTABLE = frozenset({"jax", "jaxlib", "pyarrow", "tensorflow"})
_COMPLEX_OPS = (None, dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def tensor_of(array: object, op=None, is_written: bool = True) -> Tensor:
    """A tensor over the memory of `array`. The tensor itself, if it is one of torch that can be served.

    Complex arrays become pairs of floats: one more dimension, of 2 elements.

    Args:
        op: torch.distributed's, of a sum.
        is_written: whether the call writes to the array.

    Raises UnsupportedError, with a remedy, unless this is a dense array with memory of its own; for one that is
    written to, also if it is read-only or elements share memory. ValueError for ops other than SUM and AVG of complex
    numbers.
    """
    tensor = array if isinstance(array, Tensor) else _of_other_library(array, is_written)
    if not has_memory(tensor):
        raise UnsupportedError(
            f"{type(tensor).__name__}: this kind of tensor has no memory of its own; pass a plain torch.Tensor, "
            "for a DTensor its to_local()"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"tensor of layout {tensor.layout}: pass tensor.to_dense()")
    if tensor.is_neg():
        raise UnsupportedError("tensor that is a negated view of another one: pass tensor.resolve_neg()")
    if is_written and not tensor.is_contiguous():
        _require_apart(tensor)
    return _pairs(ordinary(tensor), op) if tensor.is_complex() else ordinary(tensor)


def is_array(given: object) -> bool:
    """Whether this is one array or tensor, and no list of several."""
    return hasattr(given, "__dlpack__")


def giving(handle: Handle, given: Sequence[object], memory: Tensor) -> Handle:
    """`handle` with the arrays that its future gives.

    Args:
        given: the caller's own arrays.
        memory: what the call writes to.
    """
    if all(isinstance(each, Tensor) for each in given):
        return handle.giving(*given)
    return Handles([handle.giving(memory)], given)


def _require_apart(tensor: Tensor) -> None:
    """Raise UnsupportedError if elements may share memory, as those of `expand` and of sliding windows do."""
    reach = 0  # how far the last element is from the first in the dimensions of smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            raise UnsupportedError(
                f"tensor with strides {tensor.stride()}, whose elements share memory, which the result would be "
                "written to: pass tensor.clone()"
            )
        reach += (size - 1) * stride


def _pairs(tensor: Tensor, op) -> Tensor:
    """Complex numbers as pairs of floats."""
    if op not in _COMPLEX_OPS:
        raise ValueError(f"reduce op {op} of {tensor.dtype}: complex numbers can only be summed or averaged")
    if tensor.is_conj():
        raise UnsupportedError("tensor that is a conjugated view of another one: pass tensor.resolve_conj()")
    pairs = torch.view_as_real(tensor.detach())
    return pairs if tensor.dim() else pairs[None]  # a number has no rows: its two floats are one row, not two


def _of_other_library(array: object, is_written: bool) -> Tensor:
    """A tensor over the memory of an array that is no tensor. Raises UnsupportedError."""
    kind = type(array)
    if isinstance(array, np.ndarray):
        return _of_numpy(array, is_written)
    if not is_array(array):
        raise UnsupportedError(
            f"{kind.__name__}: not a torch.Tensor, nor a numpy array or another array with __dlpack__; pass "
            "torch.as_tensor(...)"
        )
    library = kind.__module__.partition(".")[0]
    if is_written and library in _IMMUTABLE:
        raise UnsupportedError(
            f"{library}.{kind.__name__}: arrays of {library} must not be written to, and the result would be; pass a "
            "copy, such as numpy.array(...)"
        )
    try:
        return torch.from_dlpack(array)
    except Exception as error:  # libraries raise errors of many classes
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__name__}: torch.from_dlpack can't take it: {error}"
        ) from error


def _of_numpy(array: np.ndarray, is_written: bool) -> Tensor:
    """A tensor over the memory of a numpy array. Raises UnsupportedError."""
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedError("masked numpy array, whose mask would be lost: pass array.data or array.filled()")
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return _of_numpy(array.view(np.int16), is_written).view(torch.bfloat16)
    if not array.dtype.isnative:
        remedy = "pass array.astype(array.dtype.newbyteorder('='))"
        raise UnsupportedError(f"numpy array of dtype {array.dtype.str}, in the other byte order: {remedy}")
    if any(stride < 0 for stride in array.strides):
        remedy = "pass numpy.ascontiguousarray(array)"
        raise UnsupportedError(f"numpy array with negative strides {array.strides}: {remedy}")
    if not array.flags.writeable:
        if is_written:
            raise UnsupportedError("read-only numpy array, which the result would be written to: pass array.copy()")
        array = np.asarray(_Writable(array))
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"numpy array of dtype {array.dtype}: torch can't take it: {error}") from error


class _Writable:
    """The memory of a read-only numpy array, which torch warns of. The call only reads it."""

    def __init__(self, array: np.ndarray):
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
