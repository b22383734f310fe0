"""Tensors of a version of weights as bytes: their names of dtypes, and the way from tensors of torch and back."""

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

MOST_DIMENSIONS = 255
# Dtypes that the format of safetensors names. All others have the names of torch.
_SAFETENSORS_NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32"},
    **{"uint64": "U64", "int64": "I64", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"},
    **{"complex64": "C64", "float4_e2m1fn_x2": "F4", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fn": "F8_E4M3"},
    **{"float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"},
}
# Quantized tensors have scales besides their numbers, and torch can't copy integers of fewer than 8 bits.
_NOT_HELD = re.compile(r"qu?int.*|u?int[1-7]")
_TORCH = {
    _SAFETENSORS_NAMES.get(name, name): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _NOT_HELD.fullmatch(name := str(dtype).removeprefix("torch."))
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
TORCH_ONLY = frozenset(_TORCH) - frozenset(_SAFETENSORS_NAMES.values())  # dtypes that no file of safetensors has


class Item(NamedTuple):
    """A tensor of a version, in host memory.

    Attributes:
        dtype: its name in the format of safetensors; of what that lacks, in torch.
        data: its bytes, uint8, beginning at a multiple of 8.
        memory: the same for tensors that share all of their memory; None for one that shares nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Tensor
    memory: Hashable = None


class TensorItems(Mapping[str, Item]):
    """The items of a state dict. Tensors on a GPU are copied to the host one by one, each time that one is asked for.

    Args:
        what: names the state dict in errors.

    Raises UnsupportedError for what is no state dict, then and for each tensor that can't be an item.
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


def item_of(name: str, tensor: Tensor) -> Item:
    """A tensor as an item. Raises UnsupportedError as `on_host`."""
    own = on_host(name, tensor)
    # One element is contiguous whatever its stride is, and is then no array of bytes.
    data = own.as_strided((own.numel(),), (1,)).view(torch.uint8)
    shape = tuple(own.shape)
    dtype = _NAMES[own.dtype]
    if dtype == "F4":  # torch counts pairs of them
        shape = (*shape[:-1], 2 * shape[-1])
    return Item(dtype, shape, data, memory_of(tensor))


def tensor_of(name: str, item: Item) -> Tensor:
    """The tensor that an item is, in the same memory. Raises FrameError for one that can't be."""
    if item.dtype not in _TORCH:
        raise UnsupportedError(
            f"{name}: torch {torch.__version__} has no dtype for {item.dtype}; `ncz patch apply` writes it to a file"
        )
    dtype, shape = _TORCH[item.dtype], item.shape
    if item.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise FrameError(f"{name}: shape {list(shape)} has no pairs of F4 in its last dimension")
        shape = (*shape[:-1], shape[-1] // 2)
    if math.prod(shape) * dtype.itemsize != item.data.numel():
        raise FrameError(f"{name}: {item.data.numel()} bytes are not {list(item.shape)} elements of {item.dtype}")
    return item.data.view(dtype).view(shape)


def on_host(name: str, tensor: Tensor, copy: bool = False) -> Tensor:
    """A tensor of a version in host memory, contiguous; it or a copy of it.

    Raises UnsupportedError, saying what to do, for what no patch holds.
    """
    if not isinstance(name, str) or not is_text(name):
        raise UnsupportedError(
            f"the name of a tensor must be a string that UTF-8 can write, got {ascii(name)} ({type(name).__name__}): "
            "rename it"
        )
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{name}: must be a tensor, got {type(tensor).__name__}: {_remedy(name, tensor)}")
    if not has_memory(tensor) or tensor.is_meta:
        raise UnsupportedError(
            f"{name}: {type(tensor).__name__} on {tensor.device} is no tensor with memory of its own; leave it out, or "
            "of a DTensor pass full_tensor(), which all ranks must call"
        )
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise UnsupportedError(
            f"{name}: a tensor of {tensor.dtype}, layout {tensor.layout}; patches hold dense tensors of all dtypes but "
            "quantized ones and integers of fewer than 8 bits: leave it out, or convert it"
        )
    if tensor.dim() > MOST_DIMENSIONS or (_NAMES[tensor.dtype] == "F4" and not tensor.dim()):
        raise UnsupportedError(
            f"{name}: a tensor of {tensor.dim()} dimensions; patches hold up to {MOST_DIMENSIONS}, of {tensor.dtype} "
            "at least as many as safetensors does: reshape it"
        )
    return tensor.detach().to("cpu", copy=copy).resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: object) -> Hashable:
    """The same for tensors that share all of their memory; None for what has none that could be shared."""
    plain = isinstance(tensor, Tensor) and has_memory(tensor) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or not tensor.numel():
        return None
    where = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return (*where, tensor.is_neg(), tensor.is_conj())


def is_text(name: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _remedy(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"a state dict has one level; pass its tensors under names such as '{name}.weight'"
    if isinstance(value, torch.nn.Module):
        return "pass the tensors of its state_dict()"
    if isinstance(value, (np.ndarray, np.generic, int, float, complex)):
        return "pass torch.as_tensor(...) of it"
    return "leave it out"
