"""One rank of `ncz tune`: joins the others and measures. Rank 0 reports the result.

    python -m ncz_plugins.cli.tune.rank    # started by `ncz tune`, with the job as JSON on its standard input

`ncz tune` under torchrun or horovodrun calls `take_part` in its own process instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.communicator import Communicator
from ...core.config import Config
from ...core.errors import NczError, UnsupportedError
from ...core.tuning.measure import Subject, measure
from ..perf.launch import emitter
from ..perf.rank import join
from ..perf.ranks import started_by

JOIN_SECONDS = 120  # more than starting the ranks takes


@dataclass(frozen=True)
class TuningJob:
    """Job of all ranks, sent to them as JSON.

    Attributes:
        config: configuration to tune, as a mapping.
        seconds: time for measuring.
    """

    config: dict[str, Any]
    seconds: float


def main() -> int:
    """Run one rank of the job on standard input. Returns the exit code."""
    job = TuningJob(**json.load(sys.stdin))
    try:
        take_part(job, emitter())
    except NczError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def take_part(job: TuningJob, emit: Callable[[dict[str, Any]], None]) -> None:
    """Measure as one rank; which one follows from the environment that a launcher has set.

    Args:
        job: the job.
        emit: called on rank 0 with {"measuring": name} and finally {"tuning": result}.

    Raises UnsupportedError if there is only one rank, PeerError and MismatchError.
    """
    ranks = _of_horovod if started_by() == "horovodrun" else _of_torch
    with ranks(Config(**job.config)) as subject:
        tell = emit if subject.rank == 0 else lambda record: None
        tuning = measure(subject, job.seconds, lambda what: tell({"measuring": what}))
        tell({"tuning": tuning.model_dump(mode="json")})


@contextmanager
def _of_torch(config: Config) -> Iterator[Subject]:
    join(timedelta(seconds=JOIN_SECONDS))
    try:
        _require_several(dist.get_world_size())
        with Communicator(config.resolved()) as communicator:
            yield communicator.measured_ranks(config)
        dist.barrier()  # so that no rank closes its connections while another one still uses them
    finally:
        dist.destroy_process_group()


@contextmanager
def _of_horovod(config: Config) -> Iterator[Subject]:
    import horovod.torch as hvd

    from ...horovod.tuning import OfHorovod

    hvd.init()
    try:
        _require_several(hvd.size())
        yield OfHorovod(config)
    finally:
        hvd.shutdown()


def _require_several(ranks: int) -> None:
    if ranks == 1:
        raise UnsupportedError("a single rank sends nothing, so there is nothing to tune: start 2 ranks or more")


if __name__ == "__main__":
    sys.exit(main())
