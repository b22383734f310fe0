"""Where the addresses of tensors leave Python: compiled kernels believe what they are told about memory.

All other files of this package pass tensors on. Whoever needs an address asks here, says what the memory must hold, and
gets an error in place of a crash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import WrongTensor


def host_address(tensor: Tensor, name: str, dtype: torch.dtype, length: int = 0) -> int:
    """The address of a contiguous tensor in host memory, of at least `length` elements. Raises WrongTensor.

    Without a length for the tensor that says how long the others must be.

    Each call of a kernel makes some of these: about 0.2 us more than the address alone.
    """
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous() and (not length or tensor.numel() >= length):
        return tensor.data_ptr()
    raise wrong_tensor(tensor, name, dtype, length, "cpu")


def require(tensor: Tensor, name: str, dtype: torch.dtype, length: int) -> Tensor:
    """`tensor`, if a launch on its device may take it as the argument `name`. Raises WrongTensor.

    The launch itself checks that all its tensors are contiguous and on its device.
    """
    if tensor.dtype is dtype and tensor.numel() >= length:
        return tensor
    raise wrong_tensor(tensor, name, dtype, length, "the device of the launch")


def wrong_tensor(tensor: Tensor, name: str, dtype: torch.dtype, length: int, device: str) -> WrongTensor:
    """The error for a tensor that does not fit the argument `name` of a kernel."""
    layout = "contiguous" if tensor.is_contiguous() else f"strided {tensor.stride()}"
    return WrongTensor(
        f"{name} must be {dtype}, on {device}, contiguous, of at least {length} elements; got {tensor.dtype}, on "
        f"{tensor.device}, {layout}, of {tensor.numel()} elements"
    )
