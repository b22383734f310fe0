"""Launches that are recorded once and replayed, without the Python that finds and packs their arguments.

A replay launches the same kernels with the same arguments, but for the random numbers. All addresses in them must still
be right: callers see to those of their own tensors, and working memory comes from an `Arena`.

    arena.restart()
    with recorder.recording(arena) as recording:
        ...  # launches, which run now as well
    arena.restart()
    recording.replay(noise)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..format import Noise
from .arguments import noise_bytes

_ALIGNMENT_BYTES = 512  # as of tensors on a GPU
_MIN_CHUNK_BYTES, _MIN_ZEROS_BYTES = 2 << 20, 16 << 10  # of an arena

Replay = Callable[[bytes], None]  # makes a launch again; takes the bytes of each argument that is a NoiseArgument


class Launcher(Protocol):
    """Interface that runs kernels: `nvrtc.CupyLauncher` on a GPU, an emulator in the tests."""

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """Queue `kernel` of the module for `dtype`, with `grid` blocks of `block` threads.

        Arguments: tensors on one device, numpy scalars, ctypes structures and tables of the sizes of the kernel's
        parameters, None for a null pointer.
        """

    def prepared(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> Replay:
        """A function that does what `launch` does. It keeps the addresses of tensors, and not the tensors."""


class _Chunks:
    """Memory on one device that is taken from the start, and not given back.

    Args:
        device: where it is.
        least: bytes of a chunk.
        has_zeros: whether new chunks hold zeros.
    """

    def __init__(self, device: torch.device, least: int, has_zeros: bool = False):
        self._device = device
        self._least = least
        self._has_zeros = has_zeros
        self.all: list[Tensor] = []  # kept, as recordings hold addresses in them
        self.restart()

    def restart(self) -> None:
        """All memory is free."""
        self._chunk = self._used = 0

    def take(self, nbytes: int) -> Tensor:
        """Memory that was not taken yet: uint8, [nbytes]."""
        size = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        while self._chunk < len(self.all) and self._used + size > self.all[self._chunk].numel():
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self.all):
            longest = max(size, self._least)
            if self._has_zeros:
                self.all.append(torch.zeros(longest, dtype=torch.uint8, device=self._device))
            else:
                self.all.append(torch.empty(longest, dtype=torch.uint8, device=self._device))
        start, self._used = self._used, self._used + size
        return self.all[self._chunk][start : start + nbytes]


class Arena:
    """Working memory on one device that all recordings share, as calls run one after another on one CUDA stream.

    A call gives nothing back: what one of its launches wrote, a later one may read.
    """

    def __init__(self, device: torch.device):
        self._memory = _Chunks(device, _MIN_CHUNK_BYTES)
        self._zeros = _Chunks(device, _MIN_ZEROS_BYTES, has_zeros=True)

    def restart(self) -> None:
        """Begin a call, on the current stream: all memory is free, and what holds zeros does so again."""
        self._memory.restart()
        self._zeros.restart()
        for chunk in self._zeros.all:  # mostly one: a memset for a call
            chunk.zero_()

    def empty(self, nbytes: int) -> Tensor:
        """Memory that this call has not used yet: uint8, [nbytes]."""
        return self._memory.take(nbytes)

    def zeros(self, nbytes: int) -> Tensor:
        """The same, with zeros in it."""
        return self._zeros.take(nbytes)


class Recording:
    """Launches in the order in which they were made."""

    def __init__(self):
        self._replays: list[Replay] = []

    def add(self, replay: Replay) -> None:
        self._replays.append(replay)

    def replay(self, noise: Noise | None) -> None:
        """Make all launches again on the current CUDA stream.

        Args:
            noise: random numbers in place of those of the recording; None if that had none.
        """
        argument = noise_bytes(noise)
        for replay in self._replays:
            replay(argument)


class _Thread(threading.local):
    """What one thread records, and the arena of it; None outside of `Recorder.recording`."""

    recording: Recording | None = None
    arena: Arena | None = None


class Recorder:
    """Launcher that passes all launches on to another one, and can record those of a thread.

    Working memory is taken from it. Nothing else may be queued inside of `recording`, as it would not be replayed.
    """

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self._thread = _Thread()

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """See `Launcher.launch`."""
        self._launcher.launch(kernel, dtype, grid, block, *arguments)
        if self._thread.recording is not None:
            self._thread.recording.add(self._launcher.prepared(kernel, dtype, grid, block, *arguments))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Working memory with undefined contents."""
        if self._thread.arena is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return _taken(self._thread.arena.empty, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Working memory that holds zeros."""
        if self._thread.arena is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return _taken(self._thread.arena.zeros, shape, dtype)

    @contextmanager
    def recording(self, arena: Arena) -> Iterator[Recording]:
        """A context that records what this thread launches, with working memory from `arena`."""
        mine = self._thread
        mine.recording, mine.arena = Recording(), arena
        try:
            yield mine.recording
        finally:
            mine.recording = mine.arena = None


def _taken(take: Callable[[int], Tensor], shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in memory that `take` returns for its bytes."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
