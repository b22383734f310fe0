"""One rank of `ncz perf`: joins the others and measures. Rank 0 reports the results.

    python -m ncz_plugins.cli.perf.rank    # started by `run_job`, with the job as JSON on its standard input

`ncz perf` under torchrun or horovodrun calls `take_part` in its own process instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import MismatchError, NczError
from ...core.transport.handshake import open_store
from . import data
from .gather import gathered
from .job import Job
from .launch import emitter
from .measure import Measurement

_TRAINING = timedelta(minutes=10)  # extra time, as rank 0 may first train the model whose gradients are sent


def main() -> int:
    """Run one rank of the job on standard input. Returns the exit code."""
    job = Job(**json.load(sys.stdin))
    try:
        take_part(job, emitter())
    except NczError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def take_part(job: Job, emit: Callable[[dict[str, Any]], None], measurement: type[Measurement] = Measurement) -> None:
    """Run a job as one rank; which one follows from the environment that a launcher has set.

    Args:
        job: the job.
        emit: called with records, on rank 0 only; see `Measurement`.
        measurement: how to measure.

    Raises MismatchError if ranks were started with different options, and the errors of measuring.
    """
    join(timedelta(seconds=job.timeout) + _TRAINING)
    try:
        _require_same(job)
        measurement(job, _sources(job), emit if dist.get_rank() == 0 else lambda record: None).run()
        dist.barrier()  # so that no rank closes its connections while another one still uses them
    finally:
        dist.destroy_process_group()


def join(timeout: timedelta) -> None:
    """Make the default process group, from the variables of torchrun or else through Horovod."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
        return
    import horovod.torch as hvd

    hvd.init()
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()  # set by horovodrun
    broadcast = partial(hvd.broadcast, root_rank=0, name="ncz.perf")
    store = open_store(hvd.rank(), hvd.size(), timeout, host, broadcast)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=timeout)


def _require_same(job: Job) -> None:
    jobs = gathered(asdict(job))
    differing = [rank for rank, other in enumerate(jobs) if other != jobs[0]]
    if differing:
        raise MismatchError(
            f"rank {differing[0]} was started with other options than rank 0, or lacks peers that rank 0 has: "
            f"{jobs[differing[0]]} and {jobs[0]}"
        )


def _sources(job: Job) -> list[data.Source]:
    """Sources of this rank's values; several take turns. All ranks compute gradients at the same weights."""
    if job.role == "parameter":
        return [data.weights(_trained(more)) for more in (0, 1)]
    if job.data in ("gradient", "activation"):
        source = data.Gradients if job.data == "gradient" else data.Activations
        return [source(_trained())]
    return [{"field": data.field, "noise": data.noise}.get(job.data) or data.from_file(job.data)]


def _trained(more: int = 0) -> torch.Tensor:
    """Weights that rank 0 loads or trains, on all ranks."""
    if dist.get_rank() == 0:
        weights = data.trained(more)
    else:
        weights = torch.empty(data.parameter_count(), dtype=torch.float32, device="cpu")
    dist.broadcast(weights, 0)
    return weights


if __name__ == "__main__":
    sys.exit(main())
