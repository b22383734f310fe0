"""What tensors are, and what a rank or a file holds of one: dtype and shape of the whole, and the part that is there.

A version is all tensors of a model at one moment, by name: a state dict, or a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..kernels.arrays import is_on_host, numpy_dtype
from .boxes import Box
from .elements import bits_of, row_of, shaped

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.arrays import Array

MAX_DIMENSIONS = 255

# Dtypes of the safetensors format: the name there, bits of an element, torch's name (None: torch has no such dtype).
SAFETENSORS = (
    ("BOOL", 8, "bool"),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("U16", 16, "uint16"),
    ("I16", 16, "int16"),
    ("U32", 32, "uint32"),
    ("I32", 32, "int32"),
    ("U64", 64, "uint64"),
    ("I64", 64, "int64"),
    ("F4", 4, "float4_e2m1fn_x2"),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("F32", 32, "float32"),
    ("F64", 64, "float64"),
    ("C64", 64, "complex64"),
)
SAFETENSORS_BITS = {name: bits for name, bits, _ in SAFETENSORS}

# What a tensor's frames hold, by the tensor's dtype: elements that change as a whole. A complex number is two floats,
# in one more dimension. Tensors of any other dtype are a row of bytes, and can't be held in parts.
COMPLEX = {"complex32": "float16", "C64": "float32", "complex128": "float64"}
CODED = {
    **dict.fromkeys((name for name, bits, _ in SAFETENSORS if bits == 8), "int8"),
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    **dict.fromkeys(("I16", "U16"), "int16"),
    **dict.fromkeys(("I32", "U32"), "int32"),
    **dict.fromkeys(("I64", "U64"), "int64"),
    **COMPLEX,
}

# Floats whose values may all be values of a narrower dtype, such as bf16 weights held as float32.
NARROWER = {"F32": ("BF16", "F16"), "F64": ("F32",)}


class Form(NamedTuple):
    """What a tensor is, without its values.

    Attributes:
        dtype: name of the dtype in the safetensors format, or torch's name where that format has none.
        shape: sizes of the whole tensor as a safetensors file states them. For F4 they count single elements; torch
            counts pairs.
        nbytes: bytes of the whole tensor, if it is coded as a row of bytes, else None.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int | None = None

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], nbytes: int) -> Form:
        """The form of a tensor of `nbytes` bytes."""
        return cls(dtype, tuple(shape), None if dtype in CODED else nbytes)

    @property
    def coded(self) -> str:
        """Dtype of the elements in frames, by its name in numpy and torch."""
        return CODED.get(self.dtype, "int8")

    def elements(self, narrow: str | None) -> str:
        """`coded`, or the dtype `narrow`, one of NARROWER, in which frames hold the same values."""
        return self.coded if narrow is None else CODED[narrow]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the whole tensor in elements of frames. Offsets and sizes of boxes count these elements, too."""
        if self.dtype not in CODED:
            return (self.nbytes,)
        return (*self.shape, 2) if self.dtype in COMPLEX else self.shape

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.sizes) * numpy_dtype(self.coded).itemsize

    @property
    def is_consistent(self) -> bool:
        """Whether `nbytes` stands where it must, and only there."""
        return (self.nbytes is None) == (self.dtype in CODED)


class Held(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        form: of the whole tensor.
        box: where the part lies in the whole tensor.
        data: the part: integers that hold the bits of elements of `form.coded`, of shape `box.sizes`, see elements.py.
            A view of the tensor's memory wherever that is possible.
        memory: equal for tensors that share all of their memory. None: the tensor shares no memory.
        tensor: the tensor of torch in this memory, if it is one.
    """

    form: Form
    box: Box
    data: Array
    memory: Hashable = None
    tensor: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return self.box == Box.whole(self.form.sizes)

    def is_alike(self, other: Held) -> bool:
        """Whether both have the same form and part. Only then can one be coded as changes of the other."""
        return self.form == other.form and self.box == other.box

    def on_host(self, box: Box) -> np.ndarray:
        """The elements of a box of the whole tensor: 1-D, contiguous, in host memory. A view if they lie there so."""
        data = self.data if box is self.box else box.of(self.data, self.box.offsets)
        return row_of(data).view(numpy_dtype(self.form.coded))


def are_on_host(held: Mapping[str, Held]) -> bool:
    """Whether all tensors lie in host memory."""
    return all(is_on_host(each.data) for each in held.values())


def new_held(form: Form, data: np.ndarray | None = None) -> Held:
    """A tensor of a form in `data`, uint8; None: in new memory, not filled."""
    if data is None:
        data = np.empty(form.total_bytes, np.uint8)
    return Held(form, Box.whole(form.sizes), shaped(bits_of(data.view(numpy_dtype(form.coded))), form.sizes))


def held_copy(held: Held) -> Held:
    """The same part in host memory of its own."""
    row = held.on_host(held.box)
    return held._replace(data=shaped(bits_of(row).copy(), held.box.sizes), tensor=None)
