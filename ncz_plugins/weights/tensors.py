"""What a rank holds of the tensors of a state dict: tensors of torch, DTensors, and parts of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..core.errors import FrameError, UnsupportedError
from ..core.runtime.device import has_memory
from ..kernels.arrays import numpy_dtype
from .boxes import Box
from .elements import NUMPY_DIMENSIONS
from .forms import CODED, MAX_DIMENSIONS, SAFETENSORS, Form, Held

if TYPE_CHECKING:
    from ..kernels.arrays import Array

# Torch's dtypes that patches refuse. Quantized tensors are more than their numbers: they have scales, too. Integers of
# fewer than 8 bits can't be copied by torch.
_REFUSED = re.compile(r"qu?int.*|u?int[1-7]")


def _torch_dtypes() -> dict[str, torch.dtype]:
    """The dtypes of this build of torch that patches hold, by their names in patches.

    The name in a patch is the safetensors format's, or torch's where that format has none.
    """
    names = {torch_name: name for name, _, torch_name in SAFETENSORS}
    dtypes = {}
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype):
            torch_name = str(dtype).removeprefix("torch.")
            if not _REFUSED.fullmatch(torch_name):
                dtypes[names.get(torch_name, torch_name)] = dtype
    return dtypes


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_DTYPES = _torch_dtypes()
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
    data = _elements(name, tensor.detach(), form, to_write)
    if dtype not in CODED:
        if tuple(tensor.shape) != tuple(part.shape):
            raise UnsupportedError(f"{name}: {tensor.dtype} can't be held in parts: pass the whole tensor")
        box = Box.whole(form.sizes)
    else:
        box = Box((*part.offsets, *(0 for _ in form.sizes[len(shape) :])), tuple(data.shape))
    return Held(form, box, data, memory_of(tensor), tensor)


def _elements(name: str, tensor: Tensor, form: Form, to_write: bool) -> Array:
    """`Held.data` of a tensor."""
    if form.nbytes is None:
        data = _as_coded(name, tensor, form, to_write)
    else:
        data = _as_bytes(name, tensor, to_write)
    return data.numpy() if data.is_cpu and data.dim() <= NUMPY_DIMENSIONS else data


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


def _as_coded(name: str, tensor: Tensor, form: Form, to_write: bool) -> Tensor:
    """A tensor as integers with the bits of elements of `form.coded`; complex numbers as pairs of floats."""
    if tensor.is_conj() or tensor.is_neg():
        if to_write:
            raise UnsupportedError(f"{name}: a conjugated or negated view can't be written to: pass the tensor itself")
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[numpy_dtype(form.coded).itemsize])


def _as_bytes(name: str, tensor: Tensor, to_write: bool) -> Tensor:
    """A tensor as a row of bytes, int8."""
    if to_write and not tensor.is_contiguous():
        raise UnsupportedError(f"{name}: a tensor of {tensor.dtype} must be contiguous to be written to")
    # Torch calls a tensor of one element contiguous whatever its stride is, but views it as bytes only with stride 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.int8)


def new_tensor(name: str, form: Form) -> tuple[Tensor, Held]:
    """A tensor of a form, in host memory, not filled; and the same as frames see it.

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
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    return tensor, Held(form, Box.whole(form.sizes), _elements(name, tensor, form, to_write=True), tensor=tensor)


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
