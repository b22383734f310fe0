"""What an asynchronous collective returns."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future, collect_all

from ..errors import fresh

_LEAST_SECONDS = 0.001  # of a time-out: to torch's own works zero means none


class Handle(ABC):
    """A collective that was started. Stands in for torch.distributed's `Work`."""

    outputs: Sequence[Tensor] = ()  # what the collective writes to, on one device

    def giving(self, *outputs: Tensor) -> Handle:
        """The same handle, which knows what its collective writes to: `get_future` gives that."""
        other = copy(self)
        other.outputs = outputs
        return other

    @abstractmethod
    def wait(self, timeout=None) -> bool:
        """Block until the result is in place, and return True.

        Args:
            timeout: seconds, or a timedelta as torch.distributed takes it; None waits as long as the collective does.

        Raises what went wrong, each time it is called. Raises PeerError after `timeout`; the collective goes on then.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """True once the result is in place or the collective has failed."""

    @abstractmethod
    def is_success(self) -> bool:
        """True once the result is in place."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What went wrong, once completed; else None."""

    @abstractmethod
    def get_future(self) -> Future[list[Tensor]]:
        """A future as that of torch.distributed's `Work`: its value is a list of the tensors that have the result.

        Waiting for it, or looking at its value, raises what went wrong. For a tensor on a GPU that holds up the current
        stream until the result is in place, as it does the stream of a callback that was given to `then`.
        """

    def _new_future(self) -> Future[list[Tensor]]:
        return Future(devices=[self.outputs[0].device] if self.outputs[0].is_cuda else None)


class Handles(Handle):
    """The handle of several collectives at once.

    Args:
        handles: theirs, in the order in which they run.
    """

    def __init__(self, handles: Sequence[Handle]):
        self._handles = handles

    def wait(self, timeout=None) -> bool:
        until = None if timeout is None else time.monotonic() + seconds_of(timeout)
        for handle in self._handles:
            handle.wait(None if until is None else max(_LEAST_SECONDS, until - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        return all(handle.is_success() for handle in self._handles)

    def exception(self) -> BaseException | None:
        if not self.is_completed():
            return None
        return next((error for handle in self._handles if (error := handle.exception()) is not None), None)

    def get_future(self) -> Future[list[Tensor]]:
        future = self._new_future()  # that of collect_all knows of no GPU, and nobody's stream would wait for it

        def complete(done: Future) -> None:
            with _aside(self.outputs[0].device):  # to look at values holds up the current stream
                try:
                    for each in done.value():
                        each.value()  # which raises what went wrong
                except Exception as error:
                    fail(future, error.with_traceback(None))  # which has this frame, and that has the future
                else:
                    future.set_result(list(self.outputs))

        collect_all([handle.get_future() for handle in self._handles]).add_done_callback(complete)
        return future


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """A context in which a GPU's current stream is one that nobody else waits for."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def fail(future: Future, error: BaseException) -> None:
    """Give a future an error in place of a value. Whoever asks for the value gets a copy of the error: see `fresh`.

    torch's `set_exception` would raise the error itself, whose traceback then has the frames of those who wait, which
    hold the future.
    """
    future._set_unwrap_func(_raise)
    future.set_result(error)


def _raise(error: BaseException) -> None:
    raise fresh(error)


def seconds_of(timeout: float | timedelta) -> float:
    """A time-out in seconds. torch.distributed passes a timedelta."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
