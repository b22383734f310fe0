"""What an asynchronous collective returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta


class Handle(ABC):
    """A collective that was started. Stands in for torch.distributed's `Work`."""

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


def seconds_of(timeout: float | timedelta) -> float:
    """A time-out in seconds. torch.distributed passes a timedelta."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
