"""Calls made in torch's inference mode, as evaluation makes them.

Outside of that mode nobody may write to tensors that were made in it. Calls run on another thread, which is in no such
mode, and keep memory for the next call. So all of them run outside of it, on tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def outside_of_inference_mode() -> Iterator[None]:
    """A context without inference mode. Gradients are recorded as little as in it."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """`tensor`, or in place of one of inference mode a tensor with the same memory, if called outside of that mode."""
    return torch.from_dlpack(tensor.detach()) if tensor.is_inference() else tensor
