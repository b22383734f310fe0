"""Runner of the jobs of a request: on a launcher's ranks, or on new ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from . import launch, rank
from .job import Job
from .link import link
from .request import Request

_START_SECONDS = 900  # time limit for starting the ranks and making the data


def run_jobs(request: Request) -> tuple[list[dict[str, Any]], Any]:
    """Run all jobs. Returns records, on rank 0 only, and the trace if it was requested. Raises NczError."""
    records, traces = [], []
    silent = not sys.stderr.isatty()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as progress:
        for job in request.jobs:
            task = progress.add_task(f"{job.collective} {job.link or ''}", total=1.0)

            def take(record: dict[str, Any], job: Job = job, task=task) -> None:
                if "progress" in record:
                    progress.update(task, completed=record["progress"])
                elif "trace" in record:
                    traces.append(record["trace"])
                else:
                    records.append({"link": job.link, "collective": job.collective} | record["result"])

            _run(job, request, take)
    return records, traces[0] if traces else None


def _run(job: Job, request: Request, take: Callable[[dict[str, Any]], None]) -> None:
    ranks = request.ranks
    if ranks.launcher:
        rank.take_part(job, take)
        return
    with ExitStack() as stack:
        nodes = stack.enter_context(link(ranks.count // ranks.per_node, job.link)) if job.link else None
        launch.run_ranks(
            ranks.count,
            asdict(job),
            nodes=nodes,
            ranks_per_node=ranks.per_node,
            horovod=request.needs_horovod,
            on_record=take,
            timeout=_START_SECONDS + len(job.peers) * len(job.sizes) * (job.repeat or 5) * job.timeout,
        )
