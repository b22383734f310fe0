"""Inference mode of torch, in which evaluation makes calls.

Tensors made in this mode can't be written to outside of it. But some calls run on another thread, which is not in this
mode, and all calls keep memory for the next call. So calls leave the mode, and use other tensors with the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def outside_of_inference_mode() -> AbstractContextManager:
    """A context outside of inference mode. If the mode was on, autograd records nothing in the context either."""
    return _outside() if torch.is_inference_mode_enabled() else _no_context


_no_context = nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """A tensor with the memory of `tensor` that can be written to outside of inference mode.

    Call it outside of that mode. Returns `tensor` itself if it was not made in the mode.
    """
    if not tensor.is_inference():
        return tensor
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
