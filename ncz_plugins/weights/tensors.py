"""What a rank holds of a tensor: dtype and shape of the whole, and the part of it that lies in this rank's memory.

A version is all tensors of a model at one moment, by name: a state dict, or a safetensors file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import FrameError, UnsupportedError
from ..core.runtime.device import has_memory
from .boxes import Box

MAX_DIMENSIONS = 255

# Dtypes of the safetensors format: the name there, bits of an element, torch's name (None: torch has no such dtype).
_SAFETENSORS = (
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
SAFETENSORS_BITS = {name: bits for name, bits, _ in _SAFETENSORS}

# What a tensor's frames hold, by the tensor's dtype: elements that change as a whole. A complex number is two floats,
# in one more dimension. Tensors of any other dtype are a row of bytes, and can't be held in parts.
_COMPLEX = {"complex32": torch.float16, "C64": torch.float32, "complex128": torch.float64}
_CODED = {
    **dict.fromkeys((name for name, bits, _ in _SAFETENSORS if bits == 8), torch.int8),
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    **dict.fromkeys(("I16", "U16"), torch.int16),
    **dict.fromkeys(("I32", "U32"), torch.int32),
    **dict.fromkeys(("I64", "U64"), torch.int64),
    **_COMPLEX,
}

# Floats whose values may all be values of a narrower dtype, such as bf16 weights held as float32.
NARROWER = {"F32": ("BF16", "F16"), "F64": ("F32",)}

# Torch's dtypes that patches refuse. Quantized tensors are more than their numbers: they have scales, too. Integers of
# fewer than 8 bits can't be copied by torch.
_REFUSED = re.compile(r"qu?int.*|u?int[1-7]")


def _torch_dtypes() -> dict[str, torch.dtype]:
    """The dtypes of this build of torch that patches hold, by their names in patches.

    The name in a patch is the safetensors format's, or torch's where that format has none.
    """
    names = {torch_name: name for name, _, torch_name in _SAFETENSORS}
    dtypes = {}
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype):
            torch_name = str(dtype).removeprefix("torch.")
            if not _REFUSED.fullmatch(torch_name):
                dtypes[names.get(torch_name, torch_name)] = dtype
    return dtypes


_DTYPES = _torch_dtypes()
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
TORCH_ONLY = frozenset(_DTYPES) - frozenset(SAFETENSORS_BITS)  # names of dtypes that no safetensors file can have


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that this rank holds, for state dicts. DTensors need none: they know their part.

    Attributes:
        tensor: the part.
        shape: sizes of the whole tensor.
        offsets: index of the part's first element in the whole tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


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
        return cls(dtype, tuple(shape), None if dtype in _CODED else nbytes)

    @property
    def coded(self) -> torch.dtype:
        """Dtype of the elements in frames."""
        return _CODED.get(self.dtype, torch.int8)

    def elements(self, narrow: str | None) -> torch.dtype:
        """`coded`, or the dtype `narrow`, one of NARROWER, in which frames hold the same values."""
        return self.coded if narrow is None else _CODED[narrow]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the whole tensor in elements of frames. Offsets and sizes of boxes count these elements, too."""
        if self.dtype not in _CODED:
            return (self.nbytes,)
        return (*self.shape, 2) if self.dtype in _COMPLEX else self.shape

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.sizes) * self.coded.itemsize

    @property
    def is_consistent(self) -> bool:
        """Whether `nbytes` stands where it must, and only there."""
        return (self.nbytes is None) == (self.dtype in _CODED)


class Held(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        form: of the whole tensor.
        box: where the part lies in the whole tensor.
        data: the part, as elements of `form.coded`, of shape `box.sizes`; a view of the tensor's memory wherever that
            is possible.
        memory: equal for tensors that share all of their memory. None: the tensor shares no memory.
    """

    form: Form
    box: Box
    data: Tensor
    memory: Hashable = None

    @property
    def is_whole(self) -> bool:
        return self.box == Box.whole(self.form.sizes)

    def is_alike(self, other: Held) -> bool:
        """Whether both have the same form and part. Only then can one be coded as changes of the other."""
        return self.form == other.form and self.box == other.box

    def on_host(self, box: Box) -> Tensor:
        """The elements of a box of the whole tensor: 1-D, contiguous, in host memory. A view if they lie there so."""
        data = self.data if box is self.box else box.of(self.data, self.box.offsets)
        return flat(data.to("cpu").contiguous())


# ------------------------------------------------------------------ from state dicts


def held_in(state: Mapping[str, Tensor | TensorPart], what: str, to_write: bool = False) -> dict[str, Held]:
    """What this rank holds of each tensor of a state dict. DTensors of which it holds no element are left out.

    Args:
        what: name of the argument that held `state`, for error messages.
        to_write: whether the tensors will be written to.

    Raises UnsupportedError, saying what to do, if `state` is not a mapping or a patch can't hold one of its tensors.
    """
    if not isinstance(state, Mapping):
        is_module = isinstance(state, torch.nn.Module)
        remedy = "pass its state_dict()" if is_module else "pass a state dict, such as that of a model"
        raise UnsupportedError(f"{what} must be a mapping of names to tensors, got {type(state).__name__}: {remedy}")
    held = {name: _held(name, value, to_write) for name, value in state.items()}
    return {name: each for name, each in held.items() if each is not None}


def published_in(state: Mapping[str, Tensor | TensorPart], what: str) -> dict[str, Held]:
    """`held_in` without second replicas: of DTensors with equal replicas, only the first one is published."""
    held = held_in(state, what)
    return {name: each for name, each in held.items() if not _is_second_replica(state[name])}


def is_sharded(state: Mapping[str, Tensor | TensorPart]) -> bool:
    """Whether a state dict has DTensors or parts of tensors."""
    return any(isinstance(value, TensorPart) or _knows_its_part(value) for value in state.values())


def _is_second_replica(value: object) -> bool:
    if not _knows_its_part(value):
        return False
    coordinate = value.device_mesh.get_coordinate() or ()
    return any(at and placement.is_replicate() for at, placement in zip(coordinate, value.placements))


def _held(name: str, value: object, to_write: bool) -> Held | None:
    part = _part_of(name, value)
    tensor = part.tensor
    require_held(name, tensor)
    if to_write:
        _require_apart(name, tensor)
    if _knows_its_part(value) and not tensor.numel() and math.prod(part.shape):
        return None
    # The form of the whole. An element of float4_e2m1fn_x2 is a pair of F4.
    dtype, shape = _NAMES[tensor.dtype], tuple(part.shape)
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1])
    form = Form.of(dtype, shape, tensor.nbytes)
    # The elements that frames hold.
    if dtype not in _CODED:
        if tuple(tensor.shape) != tuple(part.shape):
            raise UnsupportedError(f"{name}: {tensor.dtype} can't be held in parts: pass the whole tensor")
        box, data = Box.whole(form.sizes), _as_bytes(name, tensor.detach(), to_write)
    else:
        data = _as_coded(name, tensor.detach(), form.coded, to_write)
        box = Box((*part.offsets, *(0 for _ in form.sizes[len(shape) :])), tuple(data.shape))
    return Held(form, box, data, memory_of(tensor))


def _knows_its_part(value: object) -> bool:
    """Whether a value is a DTensor. Asked by its methods, because importing DTensor takes half a second."""
    return hasattr(value, "__create_chunk_list__") and hasattr(value, "to_local") and hasattr(value, "device_mesh")


def _part_of(name: str, value: object) -> TensorPart:
    """The part that a value of a state dict is. Raises UnsupportedError if it does not fit the whole."""
    if _knows_its_part(value):
        if any(placement.is_partial() for placement in value.placements):
            raise UnsupportedError(f"{name}: a DTensor of partial sums has no values yet: redistribute it first")
        [chunk] = getattr(value, "__create_chunk_list__")()  # noqa: B009 - a class would mangle the name
        return TensorPart(value.to_local(), tuple(value.shape), tuple(chunk.offsets))
    if not isinstance(value, TensorPart):
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        return TensorPart(value, shape, (0,) * len(shape))
    fits = isinstance(value.tensor, Tensor) and len(value.shape) == len(value.offsets) == value.tensor.dim()
    if fits and all(0 <= at <= at + n <= m for at, n, m in zip(value.offsets, value.tensor.shape, value.shape)):
        return value
    raise UnsupportedError(
        f"{name}: a part of shape {list(getattr(value.tensor, 'shape', ()))} at {list(value.offsets)} does not lie "
        f"in a tensor of shape {list(value.shape)}"
    )


def _require_apart(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError if elements of a tensor may share memory, as those of `Tensor.expand` do."""
    span = 1  # from the first element to behind the last one, of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride < span and tensor.numel():
            raise UnsupportedError(
                f"{name}: elements of strides {list(tensor.stride())} share memory and can't be written to: pass a "
                "contiguous tensor"
            )
        span += (size - 1) * stride


def _as_coded(name: str, tensor: Tensor, coded: torch.dtype, to_write: bool) -> Tensor:
    """A tensor as elements of a dtype of the same size; complex numbers as pairs of floats."""
    if tensor.is_conj() or tensor.is_neg():
        if to_write:
            raise UnsupportedError(f"{name}: a conjugated or negated view can't be written to: pass the tensor itself")
        tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(coded)


def _as_bytes(name: str, tensor: Tensor, to_write: bool) -> Tensor:
    """A tensor as a row of bytes, int8."""
    if to_write and not tensor.is_contiguous():
        raise UnsupportedError(f"{name}: a tensor of {tensor.dtype} must be contiguous to be written to")
    return flat(tensor.contiguous()).view(torch.int8)


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a row of elements.

    Torch calls a tensor of one element contiguous whatever its stride is, but views it as bytes only with stride 1.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def new_tensor(name: str, form: Form) -> Tensor:
    """A tensor of a form, in host memory, not filled.

    Raises UnsupportedError if this build of torch lacks the dtype, and FrameError if the shape does not fit the bytes.
    """
    if form.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{name}: torch {torch.__version__} has no dtype for {form.dtype}; `ncz patch apply` writes it to a file"
        )
    dtype, shape = _DTYPES[form.dtype], form.shape
    # Torch counts pairs of F4.
    if form.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise FrameError(f"{name}: the last dimension of shape {list(shape)} must be a multiple of 2 for F4")
        shape = (*shape[:-1], shape[-1] // 2)
    # Shapes come from the patch, so torch must not be asked for memory before the size has been checked.
    if math.prod(shape) * dtype.itemsize != form.total_bytes:
        raise FrameError(f"{name}: {form.total_bytes} bytes are not {list(form.shape)} elements of {form.dtype}")
    return torch.empty(shape, dtype=dtype, device="cpu")


def are_on_host(held: Mapping[str, Held]) -> bool:
    """Whether all tensors lie in host memory."""
    return all(each.data.is_cpu for each in held.values())


def held_copy(held: Held) -> Held:
    """The same part in host memory of its own."""
    return held._replace(data=held.data.detach().to("cpu", copy=True).contiguous())


def memory_of(tensor: object) -> Hashable:
    """A key that is equal for tensors that share all of their memory and read it alike.

    Returns None for an empty tensor, and for what is not a dense tensor with memory of its own.
    """
    dense = isinstance(tensor, Tensor) and has_memory(tensor) and tensor.layout == torch.strided
    if not dense or tensor.is_meta or not tensor.numel():
        return None
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return (*place, tensor.is_neg(), tensor.is_conj())


# ------------------------------------------------------------------ what patches refuse


def require_held(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError, saying what to do, unless a patch can hold this tensor under this name."""
    if not isinstance(name, str) or not is_utf8(name):
        raise UnsupportedError(
            f"the name of a tensor must be a string that UTF-8 can write, got {ascii(name)} ({type(name).__name__}): "
            "rename it"
        )
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{name}: must be a tensor, got {type(tensor).__name__}: {_remedy(name, tensor)}")
    if not has_memory(tensor) or tensor.is_meta:
        raise UnsupportedError(
            f"{name}: {type(tensor).__name__} on {tensor.device} has no memory of its own: leave it out, or pass the "
            "tensor that it wraps"
        )
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise UnsupportedError(
            f"{name}: a tensor of {tensor.dtype}, layout {tensor.layout}; patches hold dense tensors of all dtypes but "
            "quantized ones and integers of fewer than 8 bits: leave it out, or convert it"
        )
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsupportedError(
            f"{name}: a tensor of {tensor.dim()} dimensions; patches hold up to {MAX_DIMENSIONS}: reshape it"
        )
    if _NAMES[tensor.dtype] == "F4" and not tensor.dim():
        raise UnsupportedError(f"{name}: a tensor of {tensor.dtype} must have at least 1 dimension: reshape it")


def _remedy(name: str, value: object) -> str:
    """What to pass in place of a value that is not a tensor."""
    if isinstance(value, Mapping):
        return f"a state dict has one level; pass its tensors under names such as '{name}.weight'"
    if isinstance(value, torch.nn.Module):
        return "pass the tensors of its state_dict()"
    if isinstance(value, (np.ndarray, np.generic, int, float, complex)):
        return "pass torch.as_tensor(VALUE)"
    return "leave it out"


def is_utf8(name: str) -> bool:
    """Whether UTF-8 can write `name`. It can't write half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
