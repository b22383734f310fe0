"""Calls made in torch's inference mode, as evaluation makes them.

Outside of that mode nobody may write to tensors that were made in it. Some calls run on another thread, which is in no
such mode, and all keep memory for the next call. So all of them run outside of it, on tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def outside_of_inference_mode() -> AbstractContextManager:
    """A context without inference mode. If it was on, gradients are not recorded here either."""
    return _outside() if torch.is_inference_mode_enabled() else _as_it_is


_as_it_is = nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """`tensor`, or in place of one of inference mode a tensor with the same memory, if called outside of that mode."""
    if not tensor.is_inference():
        return tensor
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
