"""The records of a training: a header, and what each step was, from rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from ...version import __version__
from ..config import Config
from ..runtime.statistics import Counters
from .guard import Finding
from .metrics import Metrics


class Records:
    """Writes the records of one training.

    Args:
        config: `statistics` says where records go, and how often a line is printed.

    Attributes:
        metrics: hands each record to files and other sinks.
    """

    def __init__(self, config: Config):
        self.metrics = Metrics(config.statistics)
        self._run = os.urandom(4).hex()  # tells its records from those of others in one file
        self._header: dict | None = None
        self._among = 0  # ranks of the training, when that was written
        self._ended: float | None = None  # when the step before was written

    @property
    def begun(self) -> bool:
        """Whether a header was written."""
        return self._header is not None

    def begin(self, config: Config, header: dict, among: int = 0) -> None:
        """Open the files and write a header, unless it is the one that was written last. Raises ConfigError.

        Nor is there another header for fewer ranks, which are a group within the training.

        Args:
            among: how many ranks the training has. Of others, there may be fewer.
        """
        last = self._header
        if last is not None:
            is_group = among == self._among and header.get("ranks", 0) < last.get("ranks", 0)
            if is_group or header == last:
                return
        self.metrics.begin(
            {"ncz_plugins": __version__, "run": self._run, "config": config.model_dump(mode="json"), **header}
        )
        self._header, self._among = header, among

    def write(self, step: int, done: Counters, bound_times: float, findings: Iterable[Finding]) -> None:
        """Write what a step was.

        Args:
            step: its number, from 1.
            bound_times: what its bounds were multiplied by.
            findings: of the guard.
        """
        found = [finding._asdict() for finding in findings]
        self.metrics.write(
            {
                "step": step,
                "run": self._run,
                "time": time.time(),
                "step_seconds": None if self._ended is None else time.monotonic() - self._ended,
                **done.to_dict(),
                "bound_times": bound_times,
                **({"guard": found} if found else {}),
            }
        )

    def end_step(self) -> None:
        """The time of the next step begins."""
        self._ended = time.monotonic()
