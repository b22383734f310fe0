"""Runs the job on a launcher's ranks, or on ranks that are started for it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config import Config
from ...core.tuning.tuning_file import Tuning
from ..perf import launch
from ..perf.link import link
from ..perf.ranks import Ranks
from .rank import JOIN_SECONDS, TuningJob, take_part


def run_job(config: Config, seconds: float, ranks: Ranks, rate: str | None) -> Tuning | None:
    """Measure for about so many seconds what fits `config` best.

    Args:
        rate: of a link between the ranks that are started; None for the network as it is.

    Returns what was chosen; None on a launcher's ranks other than 0. Raises NczError.
    """
    job = TuningJob(_left_open(config).model_dump(mode="json"), seconds)
    found: list[Tuning] = []
    with Console(stderr=True, quiet=ranks.launcher is not None).status("starting the ranks") as status:

        def take(record: dict[str, Any]) -> None:
            if "measuring" in record:
                status.update(f"measuring: {record['measuring']}")
            else:
                found.append(Tuning(**record["tuning"]))

        if ranks.launcher:
            take_part(job, take)
        else:
            _on_new_ranks(job, rate, ranks, take)
    return found[0] if found else None


def _left_open(config: Config) -> Config:
    """The configuration with everything left open that the tuning file fills in."""
    open_ones = {"schedule": "auto", "frame_bytes": "auto", "min_bytes": "auto", "link_gbps": None, "tuning": None}
    entropy = config.entropy.model_copy(update={"costs": None})
    return config.with_transport(**open_ones).model_copy(update={"entropy": entropy})


def _on_new_ranks(job: TuningJob, rate: str | None, ranks: Ranks, take: Callable[[dict[str, Any]], None]) -> None:
    with ExitStack() as stack:
        nodes = stack.enter_context(link(ranks.count // ranks.per_node, rate)) if rate else None
        records = stack.enter_context(tempfile.NamedTemporaryFile())
        launch.run(
            [sys.executable, "-m", "ncz_plugins.cli.tune.rank"],
            ranks.count,
            Path(records.name),
            standard_input=json.dumps(asdict(job)),
            nodes=nodes,
            ranks_per_node=ranks.per_node,
            on_record=take,
            timeout=JOIN_SECONDS + 4 * job.seconds,
        )
