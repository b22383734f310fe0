"""The options of `ncz tune`, and its run from start to output."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import ConfigError
from ..output import is_plain, naming, require_writable
from ..perf.ranks import ranks_of
from ..settings import config_with

_SECONDS = 40.0  # default time for measuring; the last measurement may end a little later
_MOST_SECONDS = 3600


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("tune", help="measure link and codec, and write a file that a configuration can name")
    parser.add_argument("--output", metavar="FILE.json", required=True, help="the file to write")
    parser.add_argument("--ranks", metavar="N", help="ranks to start, 2 by default; under a launcher, its ranks")
    parser.add_argument("--config", metavar="FILE", help="quantizer, coder and hierarchy: a file or a preset")
    parser.add_argument("--seconds", metavar="S", type=float, help="time for measuring, 40 by default")
    parser.set_defaults(run=run, outputs={"--output": "output"})


def run(options: argparse.Namespace) -> None:
    """Measure, write the file, and print the choices and the reasons. Raises NczError."""
    config = config_with(options.config, {})
    require_writable("--output", options.output)
    if is_plain(options.output) and Path(options.output).suffix.lower() != ".json":
        raise ConfigError(f"--output {options.output}: transport.tuning needs the ending .json: name it FILE.json")
    ranks = ranks_of(options)
    seconds = _SECONDS if options.seconds is None else options.seconds
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(f"--seconds: {seconds:g} is not a number above 0 and up to {_MOST_SECONDS}")
    from .run_job import run_job  # these modules import torch
    from .show import show

    tuning = run_job(config, seconds, ranks)
    if tuning:  # on rank 0
        with naming("--output", options.output):
            tuning.write(options.output)
        show(tuning, options.output, ranks.notes())
