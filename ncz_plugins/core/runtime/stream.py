"""Calls that a GPU carries out without the host: queued on a CUDA stream, and waited for by a CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.futures import Future

from ... import kernels
from ..config import QuantizerConfig
from ..errors import UnsupportedError
from .handle import Handle


class CallStream:
    """CUDA stream of our own for calls whose sizes are all known beforehand.

    Attributes:
        backend: the kernels for this device.

    Raises ImportError, with the reason, if there are no kernels for the device.
    """

    def __init__(self, device: torch.device):
        self.backend = kernels.cuda_backend()
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def following(self, stream: torch.cuda.Stream, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """A context in which this stream is the current one. Its work begins after the work that is now on `stream`.

        Args:
            tensors: the caller's tensors that the work uses. Torch does not reuse their memory before the work is done.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(stream)
            for tensor in tensors:
                tensor.record_stream(self._stream)
            yield


class StreamHandle(Handle):
    """Handle of work on a CUDA stream. `wait` makes the current CUDA stream wait, not the host, as with NCCL's works.

    So `wait` reports no errors and ignores its time-out. If a peer dies, NCCL's watchdog ends the process.
    """

    def __init__(self, stream: torch.cuda.Stream, done: torch.cuda.Event, device: torch.device):
        self._stream = stream
        self._done = done
        self._device = device

    @classmethod
    def of_current(cls, device: torch.device) -> StreamHandle:
        """The handle of the work that is now on the current CUDA stream of `device`."""
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
            future.set_result(list(self.outputs))  # those who wait for it, wait for this stream
        return future


def require_capturable(collective: str, quantizer: QuantizerConfig) -> None:
    """Raise UnsupportedError, with a remedy, unless a CUDA graph can repeat a call with these settings."""
    if quantizer.bits is None:
        problem = "the host must know sizes that follow from the data. Set quantizer.mode: bits"
    elif quantizer.kind_in_effect == "stochastic":
        problem = "kind stochastic would draw the same numbers in every replay. Set quantizer.kind: error_bound"
    elif quantizer.feeds_back:
        problem = "error feedback is not offered in a graph. Set quantizer.error_feedback: false"
    else:
        return
    raise UnsupportedError(f"{collective}, compressed, can't be captured in a CUDA graph: {problem}")
