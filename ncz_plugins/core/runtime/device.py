"""Where tensors live: the kernels that serve them there, memory for frames, and what "done" means."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ... import kernels
from ...kernels.scratch import Scratch
from ..config import Config
from ..errors import PeerError, UnsupportedError

_POLL_SECONDS = 20e-6

_scratch = Scratch()


def require_kernels(device: torch.device, config: Config) -> None:
    """Raise UnsupportedError, saying what to do, unless tensors on `device` can be compressed as `config` asks for."""
    if device.type == "cpu":
        return
    remedy = "keep these tensors on the CPU, or leave them uncompressed"
    if device.type != "cuda":
        raise UnsupportedError(f"device {device}: only CPU and CUDA tensors can be compressed; {remedy}")
    if config.quantizer.kind == "lossless":
        raise UnsupportedError(
            f"device {device}: quantizer.kind: lossless serves CPU tensors only; use error_bound, or {remedy}"
        )
    if config.transport.wait == "stream" and not hasattr(dist.Work, "block_current_stream"):
        raise UnsupportedError(
            f"device {device}: torch {torch.__version__} is too old for transport.wait: stream; set it to host"
        )
    try:
        kernels.cuda_backend()
    except ImportError as error:
        raise UnsupportedError(f"device {device}: {error}; or {remedy}") from error


def moment(device: torch.device) -> torch.cuda.Event | None:
    """What the caller has asked `device` for so far, for `after`. Nothing on a CPU, where all of it is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def has_spare_core() -> bool:
    """Whether this process may use a second core, if the cores of this machine are shared among the ranks on it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # As torchrun and DeepSpeed's launcher set it; where nobody tells, the rank is taken to be alone.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return not ranks.isdigit() or usable >= 2 * int(ranks)


class Host:
    """Host memory: whatever was called is done when it returns, but for what goes on `beside`.

    Args:
        two_threads: whether there is a core for a second thread.

    Attributes:
        backend: the kernels.
    """

    def __init__(self, two_threads: bool = False):
        self.backend = kernels.cpu_backend()
        self._second = ThreadPoolExecutor(1, "ncz-decoder") if two_threads else None
        self._jobs: list[Future] = []

    def after(self, asked: None):
        """A context whose work begins when all that stood before the `moment` called `asked` is done."""
        return nullcontext()

    def buffer(self, nbytes: int) -> Tensor:
        """Memory to write a frame to, uint8, [nbytes], until `trimmed` is called."""
        return _scratch.of("frame", nbytes, torch.uint8)

    def trimmed(self, buffer: Tensor, size) -> Tensor:
        """The first `size` bytes of `room`, which were just written, to keep."""
        return buffer[:size].clone()  # most frames are much smaller than the room they may need

    def seen(self, tensor: Tensor) -> Tensor:
        """The same in host memory, for the host to look at."""
        return tensor

    def beside(self, job: Callable[[], None]) -> None:
        """Do what nothing waits for before `settle`: in the order asked for, on a thread of its own if there is one."""
        if self._second is None:
            job()
        else:
            self._jobs.append(self._second.submit(job))

    def settle(self) -> None:
        """Return once all work is done. Raises what the first job `beside` that failed did."""
        jobs, self._jobs = self._jobs, []
        errors = [job.exception() for job in jobs]  # waits for each
        for error in filter(None, errors):
            raise error

    def abandon(self) -> None:
        """After a failure: return once nothing writes to the caller's memory any more."""
        wait(self._jobs)
        self._jobs.clear()


class Gpu:
    """The memory of one CUDA device. Work is queued on a stream of its own, beside the caller's.

    Args:
        timeout: how long the device may take, which waits for the frames of peers.
        demand_health: raises PeerError if those frames may not come any more.

    Raises ImportError where there are no kernels for it, saying why.
    """

    def __init__(self, device: torch.device, timeout: timedelta, require_healthy: Callable[[], None]):
        self.backend = kernels.cuda_backend()
        self._device = device
        self._timeout = timeout
        self._require_healthy = require_healthy
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def after(self, asked: torch.cuda.Event):
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while not asked.query():  # however long it takes: the time-out is for peers
                time.sleep(_POLL_SECONDS)
            yield

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def trimmed(self, buffer: Tensor, size) -> Tensor:
        self.settle()  # the host must know the size, as NCCL does
        return buffer[:size]

    def seen(self, tensor: Tensor) -> Tensor:
        self.settle()  # copying it waits without a limit
        return tensor.cpu()

    def beside(self, job: Callable[[], None]) -> None:
        job()  # which only asks for work, in the order of the stream

    def abandon(self) -> None:
        """Nothing to do: work that waits for a dead peer would not end."""

    def settle(self) -> None:
        # Not by synchronizing: a peer that died would leave us waiting for ever.
        done = torch.cuda.current_stream(self._device).record_event()
        poll(done.query, self._require_healthy, self._timeout, f"{self._device}")


def poll(is_done: Callable[[], bool], require_healthy: Callable[[], None], timeout: timedelta, what: str) -> None:
    """Return once `is_done`. Raises PeerError if `what` is not done in time, and what `demand_health` raises."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not is_done():
        require_healthy()
        if time.monotonic() > deadline:
            raise PeerError(
                f"{what} was not done within {timeout.total_seconds():g} s. A peer has died, left, "
                "or not answered; look at its log, and raise transport.timeout_seconds if it was only slow."
            )
        time.sleep(_POLL_SECONDS)
    require_healthy()  # work that was given up is done, too
