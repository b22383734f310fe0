"""Working memory that each thread reuses, because fresh memory pages cost more time than coding."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_HOST = torch.device("cpu")


class Scratch(threading.local):
    """Tensors by name and device, which grow as needed.

    The next call of a thread with the same name overwrites its contents.
    """

    def __init__(self):
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._given: dict[tuple[str, torch.device], Tensor] = {}  # views of `_memory`, as they were returned last

    def of(self, name: str, count: int, dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
        """Uninitialised tensor, [count] of `dtype`."""
        size, key = count * dtype.itemsize, (name, device)
        given = self._given.get(key)
        if given is not None and given.numel() == count and given.dtype == dtype:
            return given
        if key not in self._memory or self._memory[key].numel() < size:
            self._memory[key] = torch.empty(size, dtype=torch.uint8, device=device)
        self._given[key] = self._memory[key][:size].view(dtype)
        return self._given[key]
