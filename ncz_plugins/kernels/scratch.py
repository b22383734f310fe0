"""Memory that each thread uses again and again: fresh pages cost more than coding does."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """Tensors by name, which grow as needed. What they hold lasts until the same thread asks for the name again."""

    def __init__(self):
        self._memory: dict[str, Tensor] = {}

    def of(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """[count] of `dtype`, with any values."""
        size = count * dtype.itemsize
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return self._memory[name][:size].view(dtype)
