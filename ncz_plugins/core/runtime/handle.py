"""Handles: what an asynchronous collective returns."""

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

_MIN_TIMEOUT_SECONDS = 0.001  # not 0, which torch's works take for no time-out


class Handle(ABC):
    """Handle of a collective that was started. It has the methods of torch.distributed's `Work`.

    Attributes:
        outputs: what the collective writes to on this rank, all on one device: tensors, or the caller's own arrays if
            these are of another library. Then this is a `Handles`.
    """

    outputs: Sequence[Tensor] = ()

    def giving(self, *outputs: Tensor) -> Handle:
        """A copy of this handle with `outputs`, which become the value of `get_future`."""
        other = copy(self)
        other.outputs = outputs
        return other

    @abstractmethod
    def wait(self, timeout=None) -> bool:
        """Block until the result is in place, and return True.

        Args:
            timeout: in seconds, or a timedelta as in torch.distributed; None: as long as the collective takes.

        Raises the error of the collective, in each call of `wait`. Raises PeerError after `timeout`, while the
        collective goes on.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """True once the result is in place or the collective has failed."""

    @abstractmethod
    def is_success(self) -> bool:
        """True once the result is in place."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """The error of the collective, once it has failed; else None."""

    @abstractmethod
    def get_future(self) -> Future[list[Tensor]]:
        """A future like that of torch.distributed's `Work`. Its value is `outputs`, as a list.

        `wait` and `value` raise the error of the collective. For tensors on a GPU they make the current CUDA stream
        wait for the result. A callback given to `then` runs on a CUDA stream that waits for it.
        """

    def _new_future(self) -> Future[list[Tensor]]:
        return Future(devices=[each.device for each in self.outputs[:1] if each.is_cuda])


class Handles(Handle):
    """Handle of several collectives.

    Args:
        handles: one of each collective, in the order in which they run, whose outputs are tensors.
        outputs: what all of them write to.
    """

    def __init__(self, handles: Sequence[Handle], outputs: Sequence[Tensor] = ()):
        self._handles = handles
        self.outputs = outputs

    def wait(self, timeout=None) -> bool:
        deadline = None if timeout is None else time.monotonic() + seconds_of(timeout)
        for handle in self._handles:
            handle.wait(None if deadline is None else max(_MIN_TIMEOUT_SECONDS, deadline - time.monotonic()))
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
        # Not that of collect_all, which makes no CUDA stream wait.
        future = self._handles[0]._new_future()

        def complete(done: Future) -> None:
            with _on_unused_stream(self._handles[0].outputs):  # `value` makes the current CUDA stream wait
                try:
                    for each in done.value():
                        each.value()  # raises the error of this collective
                except Exception as error:
                    fail(future, error.with_traceback(None))  # its traceback holds `future`
                else:
                    future.set_result(self._value())

        collect_all([handle.get_future() for handle in self._handles]).add_done_callback(complete)
        return future

    def _value(self) -> list:
        """The value of a future."""
        if all(isinstance(each, Tensor) for each in self.outputs):
            return list(self.outputs)
        return _Arrays(self.outputs, [tensor for handle in self._handles for tensor in handle.outputs])


class _Arrays(list):
    """Arrays of other libraries as the value of a future.

    A future on a GPU pickles its value to find the tensors whose memory streams must wait for: it finds `tensors`.
    """

    def __init__(self, arrays: Sequence[object], tensors: list[Tensor]):
        super().__init__(arrays)
        self._tensors = tensors

    def __reduce__(self):
        return list, (self._tensors,)


@contextmanager
def _on_unused_stream(outputs: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the current CUDA stream of these tensors' GPU is a new one. On a CPU it does nothing."""
    if not outputs or not outputs[0].is_cuda:
        yield
        return
    with torch.cuda.device(outputs[0].device), torch.cuda.stream(torch.cuda.Stream(outputs[0].device)):
        yield


def fail(future: Future, error: BaseException) -> None:
    """End a future with an error. `wait` and `value` raise a copy of the error: see `fresh`.

    torch's `set_exception` would raise the error itself. Its traceback then has the frames of those who wait, which
    hold the future: a circle that keeps tensors.
    """
    future._set_unwrap_func(_raise)
    future.set_result(error)


def _raise(error: BaseException) -> None:
    raise fresh(error)


def seconds_of(timeout: float | timedelta) -> float:
    """A time-out in seconds. torch.distributed passes a timedelta."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
