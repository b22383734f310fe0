"""What an asynchronous collective returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from datetime import timedelta

from torch import Tensor
from torch.futures import Future


class Handle(ABC):
    """A collective that was started. Stands in for torch.distributed's `Work`."""

    output: Tensor | None = None  # what the collective writes to

    def giving(self, output: Tensor) -> Handle:
        """The same handle, which knows what its collective writes to: `get_future` gives that."""
        other = copy(self)
        other.output = output
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
        """A future as that of torch.distributed's `Work`: its value is a list of the tensor that has the result.

        Waiting for it, or looking at its value, raises what went wrong. For a tensor on a GPU that holds up the current
        stream until the result is in place, as it does the stream of a callback that was given to `then`.
        """

    def _new_future(self) -> Future[list[Tensor]]:
        return Future(devices=[self.output.device] if self.output.is_cuda else None)


def seconds_of(timeout: float | timedelta) -> float:
    """A time-out in seconds. torch.distributed passes a timedelta."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
