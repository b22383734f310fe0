"""The options of `ncz report`, and its run from start to output."""

from __future__ import annotations

import argparse

from ..output import print_json, require_picture, unbroken_console


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("report", help="what the records of a training say, and what limited it")
    parser.add_argument("file", metavar="RUN.jsonl", help="the file that statistics.jsonl named")
    add_training(parser)
    parser.add_argument("--from", dest="first", metavar="STEP", type=int, help="leave out the steps before this one")
    parser.add_argument("--to", dest="last", metavar="STEP", type=int, help="leave out the steps after this one")
    parser.add_argument("--plan", metavar="PLAN.json", help="compare with what `ncz plan --json` predicted")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw ratio, bytes, error and times against the steps")
    parser.set_defaults(run=run, outputs={"--plot": "plot"})


def add_training(parser: argparse._ActionsContainer) -> None:
    """Add the option that chooses one of several trainings in a file."""
    parser.add_argument("--training", metavar="N", type=int, help="of several that wrote the file at the same time")


def run(options: argparse.Namespace) -> None:
    """Read the records, and show what they say. Raises ConfigError and UnsupportedError."""
    from .planned import compare, read_plan
    from .read import read
    from .show import document, show
    from .summary import summarize
    from .verdict import verdict

    if options.plot:
        require_picture("--plot", options.plot)
    plan = read_plan(options.plan) if options.plan else None
    found = read(options.file, options.training).between(options.first, options.last)
    summary = summarize(found)
    conclusions = verdict(summary, found.header)
    comparison = plan and compare(plan, summary, found.header)
    if options.json:
        print_json(document(options.file, found, summary, conclusions, comparison))
    else:
        show(unbroken_console(), options.file, found, summary, conclusions, comparison)
    if options.plot:
        from .plot import draw  # imports matplotlib

        draw(options.plot, found, options.file)
