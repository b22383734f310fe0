"""Working memory that each thread reuses, because fresh memory pages cost more than coding."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """Tensors by name, which grow as needed. Their contents last until the same thread asks for the name again."""

    def __init__(self):
        self._memory: dict[str, Tensor] = {}

    def of(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, [count] of `dtype`."""
        size = count * dtype.itemsize
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return self._memory[name][:size].view(dtype)
