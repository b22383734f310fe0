"""Tensors as bytes. An `Item` is one tensor of a version of the weights; this file converts torch's tensors to and fro.

A version is all tensors of a model at one moment, by name: a state dict, or a safetensors file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import FrameError, UnsupportedError
from ..core.runtime.device import has_memory

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


class Item(NamedTuple):
    """One tensor of a version, in host memory.

    Attributes:
        dtype: name of the dtype in the safetensors format, or torch's name where that format has none.
        shape: sizes as a safetensors file states them. For F4 they count single elements; torch counts pairs.
        data: the tensor's bytes, uint8, 1-D. The address is a multiple of 8.
        memory: equal for tensors that share all of their memory. None: the tensor shares no memory.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Tensor
    memory: Hashable = None


class TensorItems(Mapping[str, Item]):
    """The items of a state dict, each made when it is asked for, so that tensors on a GPU are copied one at a time.

    Args:
        state: tensors by name.
        what: name of the argument that held `state`, for error messages.

    Raises UnsupportedError if `state` is not a mapping. Asking for an item raises UnsupportedError if a patch can't
    hold the tensor.
    """

    def __init__(self, state: Mapping[str, Tensor], what: str):
        require_state(state, what)
        self._state = state

    def __getitem__(self, name: str) -> Item:
        return item_of(name, self._state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def require_state(state: object, what: str) -> None:
    """Raise UnsupportedError, saying what to pass, unless `state` is a mapping."""
    if isinstance(state, Mapping):
        return
    remedy = (
        "pass its state_dict()" if isinstance(state, torch.nn.Module) else "pass a state dict, such as that of a model"
    )
    raise UnsupportedError(f"{what} must be a mapping of names to tensors, got {type(state).__name__}: {remedy}")


# ------------------------------------------------------------------ from tensors to items and back


def item_of(name: str, tensor: Tensor) -> Item:
    """Convert a tensor to an item. Raises UnsupportedError if a patch can't hold the tensor."""
    host = on_host(name, tensor)
    # Torch calls a tensor of one element contiguous whatever its stride is, but views it as bytes only with stride 1.
    data = host.as_strided((host.numel(),), (1,)).view(torch.uint8)
    # An element of float4_e2m1fn_x2 is a pair of F4.
    dtype, shape = _NAMES[host.dtype], tuple(host.shape)
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1])
    return Item(dtype, shape, data, memory_of(tensor))


def tensor_of(name: str, item: Item) -> Tensor:
    """Convert an item to a tensor in the same memory.

    Raises UnsupportedError if this build of torch lacks the dtype, and FrameError if the shape does not fit the bytes.
    """
    if item.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{name}: torch {torch.__version__} has no dtype for {item.dtype}; `ncz patch apply` writes it to a file"
        )
    dtype, shape = _DTYPES[item.dtype], item.shape
    # Torch counts pairs of F4.
    if item.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise FrameError(f"{name}: the last dimension of shape {list(shape)} must be a multiple of 2 for F4")
        shape = (*shape[:-1], shape[-1] // 2)
    # Shapes come from the patch, so torch must not be asked for a view before the size has been checked.
    if math.prod(shape) * dtype.itemsize != item.data.numel():
        raise FrameError(f"{name}: {item.data.numel()} bytes are not {list(item.shape)} elements of {item.dtype}")
    return item.data.view(dtype).view(shape)


def on_host(name: str, tensor: Tensor, copy: bool = False) -> Tensor:
    """The tensor in host memory, contiguous, without its gradient graph.

    Args:
        name: the tensor's name, for error messages.
        copy: always return new memory. Otherwise a contiguous tensor in host memory is returned as it is.

    Raises UnsupportedError if a patch can't hold the tensor.
    """
    _require_held(name, tensor)
    return tensor.detach().to("cpu", copy=copy).resolve_conj().resolve_neg().contiguous()


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


def _require_held(name: str, tensor: Tensor) -> None:
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
            f"{name}: {type(tensor).__name__} on {tensor.device} has no memory of its own: leave it out. For a DTensor "
            "pass its full_tensor(), which all ranks must call"
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
