"""Elements of tensors in host memory, as numpy arrays: bits, rows, conversions that lose nothing.

numpy lacks bfloat16 and 8-bit floats, so arrays with a shape hold integers, the bits of elements. Rows, which kernels
take, have the dtype of the elements (`kernels.arrays.numpy_dtype`). An array is a tensor of torch where numpy can't
have it: on a GPU, and with more dimensions than numpy takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import kernels
from ..kernels.arrays import BFLOAT16, numpy_dtype
from ..kernels.format import OCTET
from ..kernels.ieee import ieee
from ..kernels.scratch import Scratch

if TYPE_CHECKING:
    from ..kernels.arrays import Array

NUMPY_DIMENSIONS = 32  # that every version of numpy takes
_MOST_CHANGED = 1 / 32  # of all elements: where more have changed, copying all takes less time

_scratch = Scratch()


def bits_of(x: np.ndarray) -> np.ndarray:
    """The same memory as integers of the elements' size."""
    return x.view(f"i{x.itemsize}")


def row_of(data: Array) -> np.ndarray:
    """Integers as a row: contiguous, in host memory. A view if they lie there so."""
    if not isinstance(data, np.ndarray):
        data = data.to("cpu").reshape(-1).numpy()
    return np.ascontiguousarray(data).reshape(-1)


def shaped(row: np.ndarray, sizes: tuple[int, ...]) -> Array:
    """A row of integers as an array of this shape, in the same memory."""
    if len(sizes) <= NUMPY_DIMENSIONS:
        return row.reshape(sizes)
    import torch

    return torch.from_numpy(row).view(sizes)


def copy(values: Array, into: Array) -> None:
    """Copy integers. On CPUs this takes one thread: torch would take all of its own, and wait for the last of them."""
    if isinstance(into, np.ndarray):
        np.copyto(into, values if isinstance(values, np.ndarray) else values.cpu().numpy())  # a base may be on a GPU
        return
    import torch

    into.copy_(torch.from_numpy(values) if isinstance(values, np.ndarray) else values)


class Changed(NamedTuple):
    """The new bits of few elements, and their places in a row of all. An element of 8 bytes counts as two."""

    places: np.ndarray
    bits: np.ndarray


def changes_of(values: Array, into: Array) -> Array | Changed:
    """What `write` has to write into integers so that they become `values`: only what differs, if that is little."""
    # Bytes are copied in less time than words are looked at.
    if not isinstance(into, np.ndarray) or not into.flags.c_contiguous or into.itemsize == 1:
        return values
    dtype = numpy_dtype("bfloat16" if into.itemsize == 2 else "float32")
    new, old = row_of(values).view(dtype), into.reshape(-1).view(dtype)
    most = int(_MOST_CHANGED * len(new))
    gaps, codes = _scratch.of("gaps", len(new) + OCTET, "int32"), _scratch.of("codes", most, "int32")
    count = kernels.cpu_backend().rare_differences(new, old, most, gaps, codes)
    if count > most:
        return values
    places = np.cumsum(gaps[:count], dtype=np.intp) + np.arange(count)
    return Changed(places, bits_of(new)[places])


def write(values: Array | Changed, into: Array) -> None:
    """Write what `changes_of` the same memory returned, or all values."""
    if isinstance(values, Changed):
        into.reshape(-1).view(values.bits.dtype)[values.places] = values.bits
    else:
        copy(values, into)


def have_equal_bytes(x: np.ndarray, other: np.ndarray) -> bool:
    """Whether two rows of elements are equal bit by bit. As numbers, NaN differs from itself and -0 equals 0."""
    return np.array_equal(bits_of(x), bits_of(other))


def converted(x: np.ndarray, name: str) -> np.ndarray:
    """A row as elements of the dtype `name`, which have the same values (`has_values_of`)."""
    dtype = numpy_dtype(name)
    return x if x.dtype == dtype else _converted(x, dtype)


@ieee
def _converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == BFLOAT16:  # the upper half of a float32
        return x.view(np.uint16)[1::2].copy().view(dtype)
    if x.dtype == BFLOAT16:
        return (x.view(np.uint16).astype(np.uint32) << 16).view(dtype)
    return x.astype(dtype)


def has_values_of(name: str, x: np.ndarray) -> bool:
    """Whether a narrower dtype has the values of all elements."""
    if name == "bfloat16":
        return not x.view(np.uint16)[::2].any()
    return have_equal_bytes(x, converted(converted(x, name), str(x.dtype)))
