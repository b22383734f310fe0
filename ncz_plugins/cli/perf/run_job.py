"""Runner of the job of a request: on a launcher's ranks, or on new ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..output import progress_bar
from . import launch, rank
from .job import Job
from .request import Request

_START_SECONDS = 900  # time limit for starting the ranks and making the data


class Records:
    """Records of one job, as rank 0 emits them. A context manager that shows progress on a terminal.

    Attributes:
        results: a record for each size and contender.
        trace: document for Perfetto; None if there is none.
    """

    def __init__(self, title: str):
        self.results: list[dict[str, Any]] = []
        self.trace: dict[str, Any] | None = None
        self._progress = progress_bar()
        self._task = self._progress.add_task(title, total=1.0)

    def take(self, record: dict[str, Any]) -> None:
        """Keep a record; see `Measurement`."""
        if "progress" in record:
            self._progress.update(self._task, completed=record["progress"])
        elif "trace" in record:
            self.trace = record["trace"]
        else:
            self.results.append(record["result"])

    def __enter__(self) -> Records:
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()


def run_job(request: Request) -> Records:
    """Run the job. Returns the records, on rank 0 only. Raises NczError."""
    job = request.job
    with Records(job.collective) as found:
        if request.ranks.launcher:
            rank.take_part(job, found.take)
        else:
            with tempfile.NamedTemporaryFile() as records:
                launch.run(
                    [sys.executable, "-m", "ncz_plugins.cli.perf.rank"],
                    request.ranks.count,
                    Path(records.name),
                    standard_input=json.dumps(asdict(job)),
                    on_record=found.take,
                    timeout=job_seconds(job),
                )
    return found


def job_seconds(job: Job) -> float:
    """Time limit of a job, with the start of its ranks."""
    return _START_SECONDS + len(job.peers) * len(job.sizes) * (job.repeat or 5) * job.timeout
