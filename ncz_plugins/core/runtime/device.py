"""Devices that tensors live on: kernels, memory for frames, and waiting for work to end."""

from __future__ import annotations

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...kernels.backend import Backend
from ..errors import PeerError, UnsupportedError
from .recorded import ENVIRONMENT, RecordedCalls
from .worker import FutureHandle, Worker

_SPIN_SECONDS = 5e-3  # a wait polls without sleeping for this long, as the shortest sleep takes 50 us or more
_SETTLE_WITHIN = timedelta(seconds=5)  # until queued work has ended, after NCCL was told to give up
_POLL_SECONDS = 20e-6  # the sleep between two polls after that
_MIN_ARENA_BYTES = 16 << 20
_FRAME_ALIGNMENT_BYTES = 64

HOST = torch.device("cpu")  # comparing with it takes a third of the time of `device.type == "cpu"`
_no_context = nullcontext()


class Device(ABC):
    """Device that the tensors of a call live on. Host and Gpu implement it.

    Only the thread that runs collectives uses a device, and only inside `after`.

    Attributes:
        backend: the kernels for this device.
        in_batches: True if many frames are coded together (GPU), False if one after another (CPU).
        recorded: launches of calls on a GPU, to be replayed; None: nothing is recorded.
    """

    backend: Backend
    in_batches: bool
    recorded: RecordedCalls | None = None

    @abstractmethod
    def after(self, event: torch.cuda.Event | None) -> AbstractContextManager:
        """A context in which work on this device begins after `event`, which `record_event` returned."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """Memory to write one frame to: uint8, [nbytes].

        On a CPU, call `trimmed` before the next `buffer`: both return the same memory otherwise.
        """

    @abstractmethod
    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Keep the first bytes of each buffer, which hold a frame; the rest of the memory may be reused.

        Args:
            sizes: bytes to keep of each buffer.

        Returns the frames, each uint8, [size]. On a CPU they are valid until the next collective.
        """

    @abstractmethod
    def start_copy_to_host(self, tensor: Tensor | np.ndarray) -> Callable[[], Tensor | np.ndarray]:
        """Begin to copy `tensor` to host memory. On a CPU nothing is copied.

        Returns a function that waits for the copy and returns it. On a GPU the function raises what `synchronize`
        raises, but does not wait for work that is queued later.
        """

    def copy_to_host(self, tensor: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """Copy `tensor` to host memory, and wait for the copy: see `start_copy_to_host`."""
        return self.start_copy_to_host(tensor)()

    @abstractmethod
    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, at the latest in `synchronize`. Jobs run in the order of submission.

        An error of a job is raised here or by `synchronize`.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return once all work of the current collective is done. Raises the error of the first job that failed.

        On a GPU, raises PeerError if the work takes longer than the time-out, as it may wait for frames of peers.
        """

    @abstractmethod
    def check(self, *tensors: Tensor) -> list[np.ndarray]:
        """Do what `synchronize` does, and copy `tensors` to host memory. Raises DamagedFrame if a frame was damaged.

        Returns the bytes of each tensor: uint8, [nbytes].
        """

    @abstractmethod
    def abandon(self, memory: list[Tensor]) -> None:
        """After an error, keep jobs from writing to memory that the caller gives to something else. Raises nothing.

        On a CPU, returns once no job writes any more. On a GPU, queued work may still wait for a dead peer: torch does
        not reuse the memory before that work has ended, and `settle` waits for it.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait a limited time until no queued work is left, once all connections were closed. Raises nothing."""


class Host(Device):
    """Host memory. Work is done when a method returns, except submitted jobs.

    Args:
        two_threads: run submitted jobs on a second thread, which needs a core of its own.
    """

    in_batches = False  # one frame travels while the next one is coded

    def __init__(self, two_threads: bool = False):
        self.backend = kernels.cpu_backend()
        self._second = Worker("ncz-decoder") if two_threads else None
        self._jobs: list[FutureHandle] = []
        self._arena = _Arena()

    def after(self, event: None) -> AbstractContextManager:
        self._arena.reset()  # frames of the call before have been sent: each schedule waits for that
        return _no_context

    def buffer(self, nbytes: int) -> Tensor:
        return self._arena.free(nbytes)

    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        [buffer], [size] = buffers, sizes
        self._arena.take(size)
        return [buffer[:size]]

    def start_copy_to_host(self, tensor: Tensor | np.ndarray) -> Callable[[], Tensor | np.ndarray]:
        return lambda: tensor

    def use_one_thread(self) -> None:
        """Run jobs in `submit` from now on. No job may be under way."""
        self._second = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._second is None:
            job()
        else:
            self._jobs.append(self._second.submit(job))

    def synchronize(self) -> None:
        jobs, self._jobs = self._jobs, []
        errors = []
        for job in jobs:
            try:
                job.wait()
            except BaseException as error:
                errors.append(error)
        for error in errors:
            raise error

    def check(self, *tensors: Tensor) -> list[np.ndarray]:
        self.synchronize()  # the CPU kernels have raised DamagedFrame already
        return [tensor.view(torch.uint8).numpy() for tensor in tensors]

    def abandon(self, memory: list[Tensor]) -> None:
        with suppress(BaseException):
            self.synchronize()

    def settle(self) -> None:
        pass  # no job outlives its call: see `abandon`


class _Arena(threading.local):
    """Memory for the frames of one collective, one after another. Each thread has its own.

    Memory is kept from one collective to the next, which saves page faults.
    """

    def __init__(self):
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def free(self, nbytes: int) -> Tensor:
        """Memory that is not taken: uint8, [nbytes]."""
        if self._used + nbytes > self._memory.numel():
            # Full memory is released with the last frame in it.
            self._memory = torch.empty(max(_MIN_ARENA_BYTES, 2 * nbytes), dtype=torch.uint8, device="cpu")
            self._used = 0
        return self._memory[self._used : self._used + nbytes]

    def take(self, nbytes: int) -> None:
        """Take the first bytes of the memory that `free` returned last."""
        self._used += -(-nbytes // _FRAME_ALIGNMENT_BYTES) * _FRAME_ALIGNMENT_BYTES

    def reset(self) -> None:
        """Free all memory: no frame is in use any more."""
        self._used = 0


class Gpu(Device):
    """Memory of one CUDA device. Work is queued on a CUDA stream of its own, beside the caller's.

    Args:
        device: the CUDA device.
        timeout: how long queued work may take, as it may wait for frames of peers.
        require_healthy: raises PeerError if frames of peers may not come any more.

    Raises ImportError, with the reason, if there are no kernels for the device.
    """

    in_batches = True  # one launch and one wait of the host for all frames of a batch

    def __init__(self, device: torch.device, timeout: timedelta, require_healthy: Callable[[], None]):
        self.backend = kernels.cuda_backend()
        self._device = device
        self._timeout = timeout
        self._require_healthy = require_healthy
        self._stream = torch.cuda.Stream(device, priority=-1)
        if os.environ.get(ENVIRONMENT) != "0":
            self.recorded = RecordedCalls(self.backend, device)
        self._begins_after: torch.cuda.Event | None = None

    @contextmanager
    def after(self, event: torch.cuda.Event):
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)  # the host does not wait, and queues work meanwhile
            self._begins_after = event
            try:
                yield
            except BaseException:
                self.backend.forget_report(self._device)
                raise

    def buffer(self, nbytes: int) -> Tensor:
        return self.backend.empty(nbytes, self._device)

    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return [buffer[:size] for buffer, size in zip(buffers, sizes)]

    def start_copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        done = torch.cuda.current_stream(self._device).record_event()

        def wait() -> Tensor:
            self._wait(done)
            return copy

        return wait

    def submit(self, job: Callable[[], None]) -> None:
        job()  # which queues work on the CUDA stream

    def synchronize(self) -> None:
        self._wait(torch.cuda.current_stream(self._device).record_event())

    def _wait(self, done: torch.cuda.Event) -> None:
        started = time.monotonic()
        while not self._begins_after.query():  # without a time-out: this is the caller's own work
            _pause(started)
        # torch's synchronize would wait for ever if a peer has died.
        poll(done.query, self._require_healthy, self._timeout, f"{self._device}")

    def check(self, *tensors: Tensor) -> list[np.ndarray]:
        wanted = [self.backend.report(self._device)]
        for each in tensors:  # a view takes microseconds, and most tensors are bytes already
            wanted.append(each if each.dtype is torch.uint8 else each.view(torch.uint8))
        # As arrays of numpy, which are cut in a tenth of the time that tensors take.
        together, copies, at = self.copy_to_host(torch.cat(wanted)).numpy(), [], 0
        for each in wanted:
            copies.append(together[at : at + each.nbytes])
            at += each.nbytes
        self.backend.check(copies[0])
        return copies[1:]

    def abandon(self, memory: list[Tensor]) -> None:
        if self.recorded is not None:
            self.recorded.forget()
        for tensor in memory:
            tensor.record_stream(self._stream)

    def settle(self) -> None:
        # An error of CUDA, a RuntimeError, has ended the work as well.
        with suppress(PeerError, RuntimeError), torch.cuda.device(self._device):
            poll(self._stream.query, lambda: None, _SETTLE_WITHIN, f"{self._device}")


def poll(is_done: Callable[[], bool], require_healthy: Callable[[], None], timeout: timedelta, what: str) -> None:
    """Return once `is_done()` is true.

    Args:
        require_healthy: called between polls; raises an error to end the wait.
        timeout: raise PeerError after that.
        what: the first words of that error.
    """
    started = time.monotonic()
    while not is_done():
        require_healthy()
        if time.monotonic() - started > timeout.total_seconds():
            raise PeerError(
                f"{what} was not done within {timeout.total_seconds():g} s. A peer has died, left, "
                "or not answered; look at its log, and raise transport.timeout_seconds if it was only slow."
            )
        _pause(started)
    require_healthy()  # CUDA reports aborted work as done, too


def _pause(started: float) -> None:
    """Let other threads run before the next poll.

    Args:
        started: when the wait began, in seconds of `time.monotonic`.
    """
    if time.monotonic() - started < _SPIN_SECONDS:
        select.select((), (), (), 0)  # releases the GIL for a moment; time.sleep(0) takes 50 us
    else:
        time.sleep(_POLL_SECONDS)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the caller's current CUDA stream, for `Device.after`. Returns None for a CPU."""
    return None if device == HOST else torch.cuda.current_stream(device).record_event()


def has_spare_core() -> bool:
    """Whether there are at least 2 usable cores for each rank on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # torchrun and DeepSpeed's launcher set these. If neither is set, this rank counts as the only one.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return not ranks.isdigit() or usable >= 2 * int(ranks)


def require_kernels(device: torch.device) -> None:
    """Raise UnsupportedError, with a remedy, unless tensors on `device` can be compressed."""
    if device == HOST:
        return
    remedy = "keep these tensors on the CPU, or leave them uncompressed"
    if device.type != "cuda":
        raise UnsupportedError(f"device {device}: only CPU and CUDA tensors can be compressed; {remedy}")
    try:
        kernels.cuda_backend()
    except ImportError as error:
        raise UnsupportedError(f"device {device}: {error}; or {remedy}") from error


def has_memory(tensor: Tensor) -> bool:
    """Whether this tensor has memory of its own, unlike DTensors and other subclasses that wrap tensors."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
