"""Devices that tensors live on: the kernels for them, memory for frames, and when work counts as done."""

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
from .worker import FutureHandle, Worker

_SPIN_SECONDS = 5e-3  # of a wait that looks again at once; the shortest sleep takes 50 us or more
_POLL_SECONDS = 20e-6  # between two looks after that
_ROOM_BYTES = 16 << 20  # for frames, at the least; memory that is kept costs no page faults
_ALIGNMENT = 64  # of frames

_HOST = torch.device("cpu")  # to compare with it takes a third of the time of asking a device for its type
_at_once = nullcontext()


def has_memory(tensor: Tensor) -> bool:
    """Whether this kind of tensor has memory of its own, unlike DTensors and others that stand for several."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def require_tensor(tensor: object) -> None:
    """Raise UnsupportedError, saying what to do, unless this is a tensor with plain memory of its own."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{type(tensor).__name__}: not a torch.Tensor; pass torch.as_tensor(...) of it")
    if not has_memory(tensor):
        raise UnsupportedError(
            f"{type(tensor).__name__}: this kind of tensor has no memory of its own; pass a plain torch.Tensor, of a "
            "DTensor its to_local()"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"tensor of layout {tensor.layout}: pass tensor.to_dense()")
    if tensor.is_neg():
        raise UnsupportedError("tensor that is a negated view of another one: pass tensor.resolve_neg()")
    if not tensor.is_contiguous():
        raise UnsupportedError(f"tensor with strides {tensor.stride()}: pass tensor.contiguous()")


def require_kernels(device: torch.device) -> None:
    """Raise UnsupportedError, saying what to do, unless tensors on `device` can be compressed."""
    if device == _HOST:
        return
    remedy = "keep these tensors on the CPU, or leave them uncompressed"
    if device.type != "cuda":
        raise UnsupportedError(f"device {device}: only CPU and CUDA tensors can be compressed; {remedy}")
    try:
        kernels.cuda_backend()
    except ImportError as error:
        raise UnsupportedError(f"device {device}: {error}; or {remedy}") from error


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Mark what the caller has queued on its current stream so far, for `Device.after`. None on a CPU: all is done."""
    return None if device == _HOST else torch.cuda.current_stream(device).record_event()


def has_spare_core() -> bool:
    """Whether this process may use a second core, if the cores of this machine are shared among the ranks on it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # torchrun and DeepSpeed's launcher set these. Where neither is set, the rank is taken to be alone.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return not ranks.isdigit() or usable >= 2 * int(ranks)


class Device(ABC):
    """One device that tensors of a call live on. Host and Gpu implement it.

    One thread uses a device at a time: the one that runs collectives. It does so inside `after`.

    Attributes:
        backend: the kernels for this device.
        in_batches: whether frames are coded as many as possible at a time, and not one after the other.
    """

    backend: Backend
    in_batches: bool

    @abstractmethod
    def after(self, event: torch.cuda.Event | None) -> AbstractContextManager:
        """A context whose work on this device begins after `event`, which is what `record_event` gave the caller."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """Memory to write one frame to, uint8, [nbytes]. On a CPU it must be `trimmed` before the next is asked for."""

    @abstractmethod
    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """The bytes of each of `buffers` that were just written. On a CPU they stay until the next collective.

        Args:
            sizes: how many of each.
        """

    @abstractmethod
    def start_seeing(self, tensor: Tensor | np.ndarray) -> Callable[[], Tensor | np.ndarray]:
        """Begin to copy `tensor` to host memory. Returns a function that returns the copy, once it is there.

        On a GPU it waits as `synchronize` does, but for nothing that is queued later.
        """

    def seen(self, tensor: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """The same values in host memory, once they have been computed. On a GPU as `synchronize`."""
        return self.start_seeing(tensor)()

    @abstractmethod
    def submit(self, job: Callable[[], None]) -> None:
        """Run a job whose result nothing needs before `synchronize`. Jobs run in the order of submission.

        A job may raise here or in `synchronize`.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return once all work of this device's collective is done. Raises what the first failing job raised.

        On a GPU, raises PeerError if the work takes longer than the time-out, since it waits for frames of peers.
        """

    @abstractmethod
    def check(self, *tensors: Tensor) -> list[Tensor]:
        """`synchronize`, and raise DamagedFrame if kernels met damage. Returns `tensors` as `seen` does."""

    @abstractmethod
    def abandon(self) -> None:
        """After a failure, return once no job writes to the caller's memory any more. Raises nothing."""


class _Room(threading.local):
    """Memory for the frames of one collective, one behind the other; each thread has its own."""

    def __init__(self):
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def rest(self, nbytes: int) -> Tensor:
        """What nobody has taken, uint8, [nbytes]."""
        if self._used + nbytes > self._memory.numel():
            # Other memory for those that follow: what is full goes with the last of its frames.
            self._memory, self._used = torch.empty(max(_ROOM_BYTES, 2 * nbytes), dtype=torch.uint8, device="cpu"), 0
        return self._memory[self._used : self._used + nbytes]

    def take(self, nbytes: int) -> None:
        """Keep so much of what `rest` gave last."""
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def take_none(self) -> None:
        self._used = 0


class Host(Device):
    """Host memory. Everything is done when the call returns, except submitted jobs.

    Args:
        two_threads: run submitted jobs on a second thread; worth it where there is a core for it.
    """

    in_batches = False  # so that some frames travel while others are coded

    def __init__(self, two_threads: bool = False):
        self.backend = kernels.cpu_backend()
        self._second = Worker("ncz-decoder") if two_threads else None
        self._jobs: list[FutureHandle] = []
        self._room = _Room()

    def after(self, event: None) -> AbstractContextManager:
        self._room.take_none()  # the frames before have left: each schedule ends with that
        return _at_once

    def buffer(self, nbytes: int) -> Tensor:
        return self._room.rest(nbytes)

    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        # Most frames are much smaller than the buffer, whose rest is for the next.
        [buffer], [size] = buffers, sizes
        self._room.take(size)
        return [buffer[:size]]

    def start_seeing(self, tensor: Tensor | np.ndarray) -> Callable[[], Tensor | np.ndarray]:
        return lambda: tensor

    def use_one_thread(self) -> None:
        """Run submitted jobs at once from now on. There are none at the moment."""
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

    def check(self, *tensors: Tensor) -> list[Tensor]:
        self.synchronize()  # kernels of the host raise at once
        return list(tensors)

    def abandon(self) -> None:
        with suppress(BaseException):
            self.synchronize()


class Gpu(Device):
    """The memory of one CUDA device. Work is queued on a stream of its own, beside the caller's.

    Args:
        timeout: how long queued work may take, since it waits for frames of peers.
        require_healthy: raises PeerError if those frames may not come any more.

    Raises ImportError where there are no kernels for the device, saying why.
    """

    in_batches = True  # so that a frame's size costs nothing: neither launches nor waits are made for each

    def __init__(self, device: torch.device, timeout: timedelta, require_healthy: Callable[[], None]):
        self.backend = kernels.cuda_backend()
        self._device = device
        self._timeout = timeout
        self._require_healthy = require_healthy
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._begins_after: torch.cuda.Event | None = None

    @contextmanager
    def after(self, event: torch.cuda.Event):
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)  # and not the host, which queues work meanwhile
            self._begins_after = event
            try:
                yield
            except BaseException:
                self.backend.forget_report(self._device)
                raise

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def trimmed(self, buffers: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return [buffer[:size] for buffer, size in zip(buffers, sizes)]

    def start_seeing(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        done = torch.cuda.current_stream(self._device).record_event()

        def wait() -> Tensor:
            self._wait(done)
            return copy

        return wait

    def submit(self, job: Callable[[], None]) -> None:
        job()  # it only queues work on the stream

    def synchronize(self) -> None:
        self._wait(torch.cuda.current_stream(self._device).record_event())

    def _wait(self, done: torch.cuda.Event) -> None:
        started = time.monotonic()
        while not self._begins_after.query():  # however long it takes: the time-out is for peers
            _pause(started)
        # Not torch's synchronize: if a peer has died, that would wait for ever.
        poll(done.query, self._require_healthy, self._timeout, f"{self._device}")

    def check(self, *tensors: Tensor) -> list[Tensor]:
        wanted = [self.backend.report(self._device), *tensors]
        together = self.seen(torch.cat([each.view(torch.uint8) for each in wanted]))
        report, *seen = together.split([each.nbytes for each in wanted])
        self.backend.check(report.view(torch.int64))
        return [each.clone().view(tensor.dtype) for each, tensor in zip(seen, tensors)]

    def abandon(self) -> None:
        pass  # queued work that waits for a dead peer would not end


def poll(is_done: Callable[[], bool], require_healthy: Callable[[], None], timeout: timedelta, what: str) -> None:
    """Return once `is_done` is true. Raises PeerError if `what` takes longer, and what `require_healthy` raises."""
    started = time.monotonic()
    while not is_done():
        require_healthy()
        if time.monotonic() - started > timeout.total_seconds():
            raise PeerError(
                f"{what} was not done within {timeout.total_seconds():g} s. A peer has died, left, "
                "or not answered; look at its log, and raise transport.timeout_seconds if it was only slow."
            )
        _pause(started)
    require_healthy()  # work that was given up counts as done, too


def _pause(started: float) -> None:
    """Let other threads run before the next look at something that has been waited for since `started`."""
    if time.monotonic() - started < _SPIN_SECONDS:
        select.select((), (), (), 0)  # gives up the GIL and comes back at once; time.sleep(0) takes 50 us
    else:
        time.sleep(_POLL_SECONDS)
