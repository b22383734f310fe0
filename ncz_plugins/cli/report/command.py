"""What `ncz report` asks for."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from . import plot
from .read import read
from .show import show
from .summary import summarize
from .verdict import verdict


def run(options: argparse.Namespace) -> None:
    """Show what the options of the command line ask for."""
    if options.plot:
        from ..codec.plot import check  # imports torch

        check(options.plot)
    found = read(options.file).between(options.first, options.last)
    summary = summarize(found)
    findings = verdict(summary, found.header)
    if options.json:
        print(json.dumps(_document(options.file, found, summary, findings), indent=2))
    else:
        show(Console(), options.file, found, summary, findings)
    if options.plot:
        plot.draw(options.plot, found, options.file)


def _document(file, found, summary, findings) -> dict:
    header = found.header.model_dump() if found.header else None
    verdicts = [finding._asdict() for finding in findings]
    return {"file": file, "header": header, "notes": found.notes, **summary.to_dict(), "verdict": verdicts}
