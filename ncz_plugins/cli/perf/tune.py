"""`ncz tune`: measures thoroughly on the ranks that there are, or that are started for it, and writes the tuning file.

`python -m ncz_plugins.cli.perf.tune` runs one rank, with its job as JSON on its standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.communicator import Communicator
from ...core.config import Config, format_size
from ...core.errors import ConfigError, NczError, UnsupportedError
from ...core.tuning.measure import Subject, measure
from ...core.tuning.tuning_file import Tuning
from . import launch
from .command import ranks_of, started_by
from .link import link
from .rank import join

_SECONDS = 40.0  # for the measuring; what begins in them may end a little later
_MOST_SECONDS = 3600
_START_SECONDS = 120  # more than starting the ranks takes


@dataclass(frozen=True)
class Job:
    """What all ranks are told.

    Attributes:
        config: the configuration that is tuned, as a mapping.
        seconds: for the measuring.
    """

    config: dict[str, Any]
    seconds: float


def run(options: argparse.Namespace, config: Config) -> None:
    """Measure, write the file and show what it says and why, as the options of the command line ask."""
    if not os.access(Path(options.output).absolute().parent, os.W_OK):
        raise UnsupportedError(f"--output {options.output}: no file can be made there")
    launcher, ranks, per_node = ranks_of(options)
    seconds = _SECONDS if options.seconds is None else options.seconds
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(f"--seconds: {seconds:g} is not a number above 0 and up to {_MOST_SECONDS}")
    job = Job(_left_open(config).model_dump(mode="json"), seconds)
    found: list[Tuning] = []
    with Console(stderr=True, quiet=launcher is not None).status("starting the ranks") as status:

        def take(record: dict[str, Any]) -> None:
            if "measuring" in record:
                status.update(f"measuring: {record['measuring']}")
            else:
                found.append(Tuning(**record["tuning"]))

        if launcher:
            take_part(job, take)
        else:
            _on_own_ranks(job, options.link, ranks, per_node, take)
    for tuning in found:  # one, on one rank
        tuning.write(options.output)
        _show(tuning, options.output)


def _left_open(config: Config) -> Config:
    """The configuration without what the file is to say."""
    open_ones = {"schedule": "auto", "frame_bytes": "auto", "min_bytes": "auto", "link_gbps": None, "tuning": None}
    entropy = config.entropy.model_copy(update={"costs": None})
    return config.with_transport(**open_ones).model_copy(update={"entropy": entropy})


def _on_own_ranks(job: Job, rate: str | None, ranks: int, per_node: int, take: Callable) -> None:
    with ExitStack() as stack:
        nodes = stack.enter_context(link(ranks // per_node, rate)) if rate else None
        records = stack.enter_context(tempfile.NamedTemporaryFile())
        launch.run(
            [sys.executable, "-m", "ncz_plugins.cli.perf.tune"],
            ranks,
            Path(records.name),
            standard_input=json.dumps(asdict(job)),
            nodes=nodes,
            ranks_per_node=per_node,
            on_record=take,
            timeout=_START_SECONDS + 4 * job.seconds,
        )


# ------------------------------------------------------------------ one rank


def main() -> int:
    """Run one rank of the job on standard input; the exit code."""
    job = Job(**json.load(sys.stdin))
    descriptor = os.environ.get(launch.RECORDS)
    records = open(int(descriptor), "w", buffering=1, closefd=False) if descriptor else None
    try:
        take_part(job, lambda record: print(json.dumps(record), file=records) if records else None)
    except NczError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def take_part(job: Job, emit: Callable[[dict[str, Any]], None]) -> None:
    """Measure as the rank that a launcher's environment says; `emit` is called on rank 0 only.

    Raises UnsupportedError where there is but one rank, PeerError and MismatchError.
    """
    ranks = _of_horovod if started_by() == "horovodrun" else _of_torch
    with ranks(Config(**job.config)) as subject:
        tell = emit if subject.rank == 0 else lambda record: None
        tuning = measure(subject, job.seconds, lambda what: tell({"measuring": what}))
        tell({"tuning": tuning.model_dump(mode="json")})


@contextmanager
def _of_torch(config: Config) -> Iterator[Subject]:
    join(timedelta(seconds=_START_SECONDS))
    try:
        _demand_several(dist.get_world_size())
        with Communicator(config.resolved()) as communicator:
            yield communicator.measured_ranks(config)
        dist.barrier()  # so that nobody's connections go while another still ends
    finally:
        dist.destroy_process_group()


@contextmanager
def _of_horovod(config: Config) -> Iterator[Subject]:
    import horovod.torch as hvd

    from ...horovod.tuning import OfHorovod

    hvd.init()
    try:
        _demand_several(hvd.size())
        yield OfHorovod(config)
    finally:
        hvd.shutdown()


def _demand_several(ranks: int) -> None:
    if ranks == 1:
        raise UnsupportedError("a single rank sends nothing that could be tuned: start several")


# ------------------------------------------------------------------ showing


def _show(tuning: Tuning, file: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(Text(tuning.describe()), soft_wrap=True)
    console.print()
    trials = Table(box=None, pad_edge=False)
    for heading in ("schedule", "frames", "size", "time"):
        trials.add_column(heading, justify="left" if heading == "schedule" else "right")
    trials.add_column("")
    for trial in tuning.trials:
        mark = "chosen" if (trial.schedule, trial.frame_bytes) == (tuning.schedule, tuning.frame_bytes) else ""
        sizes = format_size(trial.frame_bytes), format_size(trial.nbytes)
        trials.add_row(trial.schedule, *sizes, _milliseconds(trial.seconds), mark)
    console.print(trials)
    console.print()
    comparisons = Table(box=None, pad_edge=False)
    for heading in ("size", "plain", "compressed", "times as fast"):
        comparisons.add_column(heading, justify="right")
    comparisons.add_column("")
    for each in tuning.comparisons:
        compressed = tuning.min_bytes != "never" and each.nbytes >= tuning.min_bytes
        comparisons.add_row(
            format_size(each.nbytes),
            _milliseconds(each.plain_seconds),
            _milliseconds(each.compressed_seconds),
            f"{each.speed_up:.2f}",
            "compressed" if compressed else "plain",
        )
    console.print(comparisons)
    console.print()
    costs = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in tuning.costs.model_dump().items())
    console.print(Text(f"picoseconds per value, kernels {tuning.kernels}: {costs}"))
    received = f"""
{file} is written. A configuration takes from it what it leaves open:
transport: {{tuning: {file}, frame_bytes: auto, min_bytes: auto}}"""
    console.print(Text(received), soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
