"""The options of `ncz codec`, and its run from start to output."""

from __future__ import annotations

import argparse

from rich.text import Text

from ...core.config import Config
from ...core.errors import ConfigError, UnsupportedError
from .. import loss
from ..output import grid, print_json, require_picture, unbroken_console
from ..settings import config_with, parse_bound, parse_number


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("codec", help="what an array would compress to: ratio, error, speed")
    parser.add_argument("file", metavar="FILE.npy", help="float16, float32 or float64, of any shape")
    parser.add_argument(
        "--bound", metavar="MODE:VALUE", help="error bound: rms:0.25, rel:1e-3, range:1e-4, abs:0.01 ..."
    )
    parser.add_argument("--block", metavar="N", help="elements that share one scale; 0: all of them")
    parser.add_argument("--quantizer", metavar="KIND", help="error_bound, stochastic, lossless")
    parser.add_argument("--coder", metavar="NAME", help="auto, raw, fixed, huffman, rans")
    parser.add_argument("--predictor", metavar="NAME", help="auto, none, delta")
    parser.add_argument("--link", metavar="GBIT", help="speed of the link in Gbit/s, for coder auto")
    parser.add_argument("--frame", metavar="SIZE", help="input bytes per frame, such as 1MiB")
    parser.add_argument(
        "--config", metavar="FILE", help="settings: a file or a preset, such as ncclz:small; options override them"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw ratio against bound")
    parser.set_defaults(run=run, outputs={"--plot": "plot"})


def run(options: argparse.Namespace) -> None:
    """Compress the array, and print the result. Raises NczError."""
    config = _config(options)
    from . import show  # these modules import torch
    from .array_file import read_array
    from .round_trip import round_trip
    from .speed import speeds

    if options.plot:
        require_picture("--plot", options.plot)
    array = read_array(options.file)
    trip = round_trip(array, config)
    if options.plot and trip.entropy_bits is None:
        raise UnsupportedError("--plot draws codes, and there are none: the array is empty or compressed without loss")
    own = speeds(trip)
    if options.json:
        print_json(show.document(trip, own))
    else:
        console = unbroken_console()
        console.print(Text(f"{options.file}: {array.size:,} {array.dtype}, {array.nbytes / 1e6:,.1f} MB"))
        console.print(Text(config.describe()))
        console.print(Text(f"loss of a training: {loss.describe(config.quantizer)}"))
        console.print()
        console.print(grid(show.rows(trip, own)))
    if options.plot:
        from . import plot  # imports matplotlib

        plot.draw(options.plot, array, config)


def _config(options: argparse.Namespace) -> Config:
    """Settings of --config, or the defaults, overridden by the other options."""
    given = {
        "quantizer": {"kind": options.quantizer, **parse_bound(options.bound), "block": parse_number(options.block)},
        "entropy": {"coder": options.coder, "predictor": options.predictor},
        "transport": {"link_gbps": parse_number(options.link), "frame_bytes": parse_number(options.frame)},
    }
    config = config_with(options.config, given)
    if config.quantizer.kind == "lossless" and (options.bound or options.block):
        raise ConfigError("--bound and --block have no effect with the quantizer lossless, which keeps every bit")
    return config
