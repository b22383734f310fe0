"""Records of a training, written by rank 0: a header, then one record per step."""

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
    """Writer of the records of one training.

    Args:
        config: `config.statistics` names the files.

    Attributes:
        metrics: passes each record to files and other sinks.
    """

    def __init__(self, config: Config):
        self.metrics = Metrics(config.statistics)
        self._run = os.urandom(4).hex()  # tells trainings that write to one file apart
        self._header: dict | None = None
        self._world_size = 0  # ranks of the training when the header was written
        self._step_started: float | None = None  # time.monotonic() at the end of the previous step

    @property
    def begun(self) -> bool:
        """Whether a header has been written."""
        return self._header is not None

    def begin(self, config: Config, header: dict, world_size: int = 0) -> None:
        """Open the files and write a header. Raises ConfigError if a file can't be written.

        Nothing is written if the header equals the previous one, or is that of a subgroup: fewer ranks within the same
        training.

        Args:
            header: further keys of the header; "ranks" is the number of ranks of a communicator.
            world_size: number of ranks of the whole training.
        """
        last = self._header
        if last is not None:
            is_subgroup = world_size == self._world_size and header.get("ranks", 0) < last.get("ranks", 0)
            if is_subgroup or header == last:
                return
        self.metrics.begin(
            {"ncz_plugins": __version__, "run": self._run, "config": config.model_dump(mode="json"), **header}
        )
        self._header, self._world_size = header, world_size

    def write(self, step: int, done: Counters, bound_times: float, findings: Iterable[Finding]) -> None:
        """Write the record of one step.

        Args:
            step: number of the step, from 1.
            done: counters of this step.
            bound_times: factor on all error bounds in this step.
            findings: what the guard found in this step.
        """
        found = [finding._asdict() for finding in findings]
        self.metrics.write(
            {
                "step": step,
                "run": self._run,
                "time": time.time(),
                "step_seconds": None if self._step_started is None else time.monotonic() - self._step_started,
                **done.to_dict(),
                "bound_times": bound_times,
                **({"guard": found} if found else {}),
            }
        )

    def end_step(self) -> None:
        """Start the time of the next step."""
        self._step_started = time.monotonic()
