"""Working memory that each thread reuses, because fresh memory pages cost more time than coding."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .arrays import NAMES, empty, numpy_dtype, viewed

if TYPE_CHECKING:
    from .arrays import Array


class Scratch(threading.local):
    """Arrays by name and device, which grow as needed.

    The next call of a thread with the same name overwrites its contents.
    """

    def __init__(self):
        self._memory: dict[tuple[str, Any], Array] = {}
        # Views of `_memory`, as they were returned last.
        self._given: dict[tuple[str, Any], tuple[int, Any, Array]] = {}

    def of(self, name: str, count: int, dtype: Any, device: Any = None) -> Array:
        """Uninitialised array, [count] of `dtype`, a dtype of torch or its name. `device`: see `device_of`."""
        key = name, device
        given = self._given.get(key)
        if given is not None and given[0] == count and given[1] == dtype:
            return given[2]
        size = count * numpy_dtype(NAMES[dtype]).itemsize
        if key not in self._memory or len(self._memory[key]) < size:
            self._memory[key] = empty(size, "uint8", device)
        self._given[key] = count, dtype, viewed(self._memory[key][:size], NAMES[dtype])
        return self._given[key][2]
