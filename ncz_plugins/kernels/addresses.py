"""Addresses of tensors for compiled kernels, checked: kernels trust what they are told about memory.

All other files of this package pass tensors on. Whoever needs an address asks here, says what the memory must hold, and
gets an error instead of a crash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import WrongTensor


def host_address(tensor: Tensor, name: str, dtype: torch.dtype, length: int = 0) -> int:
    """Address of a contiguous tensor in host memory with at least `length` elements. Raises WrongTensor.

    `length` 0 is for the tensor that says how long the others must be. The check takes about 0.2 us.
    """
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous() and (not length or tensor.numel() >= length):
        return tensor.data_ptr()
    raise wrong_tensor(tensor, name, dtype, length, "cpu")


def require(tensor: Tensor, name: str, dtype: torch.dtype, length: int) -> Tensor:
    """`tensor`, if it has this dtype and at least `length` elements. Raises WrongTensor.

    The launch that takes the tensor as its argument `name` checks that all its tensors are contiguous and on its
    device.
    """
    if tensor.dtype is dtype and tensor.numel() >= length:
        return tensor
    raise wrong_tensor(tensor, name, dtype, length, "the device of the launch")


def wrong_tensor(tensor: Tensor, name: str, dtype: torch.dtype, length: int, device: str) -> WrongTensor:
    """Error for a tensor that does not fit the argument `name` of a kernel."""
    layout = "contiguous" if tensor.is_contiguous() else f"strided {tensor.stride()}"
    return WrongTensor(
        f"{name} must be {dtype}, on {device}, contiguous, of at least {length} elements; got {tensor.dtype}, on "
        f"{tensor.device}, {layout}, of {tensor.numel()} elements"
    )
