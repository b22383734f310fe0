"""The options of `ncz perf`, and its run from start to output."""

from __future__ import annotations

import argparse
import json

from ...core.config import Config, Policy, QuantizerOverrides
from ...core.errors import ConfigError
from ..output import print_json, require_picture, require_writable, write_file
from ..settings import config_with, parse_bound
from .job import COLLECTIVES, DATA

EPILOG = "data: " + "; ".join(f"{name}: {what}" for name, what in DATA.items())


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser(
        "perf",
        help="speed of a collective: plain, cast to 16 bits, by DDP's hooks, and compressed",
        epilog=EPILOG,
    )
    add_options(parser)
    parser.set_defaults(run=run, outputs={"--plot": "plot", "--trace": "trace"})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement to a parser."""
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--ranks", metavar="N", help="ranks to start, 2 by default; under a launcher, its ranks")
    parser.add_argument("--sizes", metavar="FROM:TO", default="64K:64M:4", help="64K:256M, 64K:64M:4 (steps) or 64K,1M")
    parser.add_argument("--peers", metavar="NAMES", default="none", help="a,b,c, all or none, beside plain and ncz")
    parser.add_argument("--data", metavar="NAME", default="gradient", help=f"{', '.join(DATA)} or FILE.npy; see below")
    parser.add_argument(
        "--bound", metavar="MODE:VALUE", help="error bound: rms:0.25, rel:1e-3, range:1e-4, abs:0.01 ..."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings: a file or a preset, such as ncclz:small; --bound overrides them"
    )
    parser.add_argument(
        "--repeat", metavar="N", help="timed rounds; by default as many as fit into 2 seconds, 5 to 500"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw speed-up against size")
    parser.add_argument("--trace", metavar="FILE.json", help="also record one call of the largest size, for Perfetto")


def run(options: argparse.Namespace) -> None:
    """Measure what the options ask for, and print the results. Raises NczError."""
    config = settings_of(options)
    from . import show  # these modules import torch
    from .request import read
    from .run_job import run_job

    request = read(options, config)
    found = run_job(request)
    records = found.results
    if not records:  # only rank 0 has records
        return
    if options.json:
        print_json(show.document(options.command, request, records))
    else:
        show.show(request, config, records)
    if options.plot:
        from . import plot  # imports matplotlib

        plot.draw(options.plot, records, show.title(request, records))
    if found.trace is not None:
        write_file("--trace", options.trace, json.dumps(found.trace))


def settings_of(options: argparse.Namespace) -> Config:
    """Settings of our contender. Raises ConfigError for these and for files that can't be written."""
    bound = parse_bound(options.bound)
    config = config_with(options.config, {"quantizer": bound})
    if config.quantizer.kind == "lossless" and options.bound:
        raise ConfigError("--bound has no effect with the quantizer lossless, which keeps every bit")
    if options.data == "activation" and bound:  # activations have a quantizer of their own
        policy = Policy(role="activation", quantizer=QuantizerOverrides(**bound))
        config = config.model_copy(update={"policies": (policy, *config.policies)})
    if options.plot:
        require_picture("--plot", options.plot)
    if options.trace:
        require_writable("--trace", options.trace)
    return config
