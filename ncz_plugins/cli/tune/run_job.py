"""Runner of the job of `ncz tune`: on a launcher's ranks, or on new ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config import Config
from ...core.tuning.tuning_file import Tuning
from ..perf import launch
from ..perf.ranks import Ranks
from .rank import JOIN_SECONDS, TuningJob, take_part


def run_job(config: Config, seconds: float, ranks: Ranks) -> Tuning | None:
    """Measure, and choose the best settings for `config`.

    Args:
        config: configuration to tune.
        seconds: time for measuring, approximately.
        ranks: the ranks that take part.

    Returns the choices; None on a launcher's ranks other than 0. Raises NczError.
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
            _on_new_ranks(job, ranks, take)
    return found[0] if found else None


def _left_open(config: Config) -> Config:
    """A copy of `config` with all settings open that a tuning file fills in."""
    open_ones = {"schedule": "auto", "frame_bytes": "auto", "min_bytes": "auto", "link_gbps": None, "tuning": None}
    entropy = config.entropy.model_copy(update={"costs": None})
    return config.with_transport(**open_ones).model_copy(update={"entropy": entropy})


def _on_new_ranks(job: TuningJob, ranks: Ranks, take: Callable[[dict[str, Any]], None]) -> None:
    with tempfile.NamedTemporaryFile() as records:
        launch.run(
            [sys.executable, "-m", "ncz_plugins.cli.tune.rank"],
            ranks.count,
            Path(records.name),
            standard_input=json.dumps(asdict(job)),
            on_record=take,
            timeout=JOIN_SECONDS + 4 * job.seconds,
        )
