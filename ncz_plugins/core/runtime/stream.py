"""Calls that a GPU carries out without the host: queued on a stream, waited for by a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.futures import Future

from ... import kernels
from ..config import QuantizerConfig
from ..errors import UnsupportedError
from .handle import Handle


class CallStream:
    """A stream of one CUDA device, beside the caller's, for calls whose sizes are all known beforehand.

    Attributes:
        backend: the kernels for this device.

    Raises ImportError where there are no kernels for the device, saying why.
    """

    def __init__(self, device: torch.device):
        self.backend = kernels.cuda_backend()
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def queue(self, tensors: list[Tensor], work: Callable[[], None]) -> StreamHandle:
        """Queue `work`, behind all that the current stream has been given so far.

        Args:
            tensors: the caller's memory that it uses, which is then not given to others before it is done.
        """
        with self.following(torch.cuda.current_stream(self._device)):
            for tensor in tensors:
                tensor.record_stream(self._stream)
            work()
            return StreamHandle.of_current(self._device)

    @contextmanager
    def following(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A context in which this stream is the current one, and follows what `stream` has been given so far."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(stream)
            yield


class StreamHandle(Handle):
    """The handle of work on a stream. `wait` holds up the current stream and not the host, as NCCL's own does.

    So `wait` tells of no failure and knows no time-out; NCCL's watchdog ends the process of a rank whose peer has died.
    """

    def __init__(self, stream: torch.cuda.Stream, done: torch.cuda.Event, device: torch.device):
        self._stream = stream
        self._done = done
        self._device = device

    @classmethod
    def of_current(cls, device: torch.device) -> StreamHandle:
        """The handle of all that the current stream of `device` has been given so far."""
        stream = torch.cuda.current_stream(device)
        return cls(stream, stream.record_event(), device)

    def wait(self, timeout=None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return self._done.query()

    def exception(self) -> None:
        return None

    def get_future(self) -> Future[list[Tensor]]:
        future = self._new_future()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            future.set_result(list(self.outputs))  # whoever waits, waits for this stream
        return future


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph that uses this tensor is being captured on the current stream."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def require_capturable(collective: str, quantizer: QuantizerConfig) -> None:
    """Raise UnsupportedError unless a CUDA graph can repeat such a call."""
    if quantizer.bits is None:
        problem = "the host must know sizes that follow from the data. Set quantizer.mode: bits"
    elif quantizer.kind_in_effect == "stochastic":
        problem = "kind stochastic would draw the same numbers in every replay. Set quantizer.kind: error_bound"
    elif quantizer.feeds_back:
        problem = "error feedback is not offered in a graph. Set quantizer.error_feedback: false"
    else:
        return
    raise UnsupportedError(f"{collective}, compressed, can't be captured in a CUDA graph: {problem}")
