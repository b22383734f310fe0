"""Printed output of `ncz perf`, and its JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ...core.config import Config
from ...version import __version__
from .. import machine
from ..output import OutputConsole
from .job import DATA
from .request import Request
from .table import records_table


def document(command: str, request: Request, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The document that --json prints.

    Args:
        command: the command line, to keep with the results.
    """
    return {
        "command": command,
        "versions": _versions(),
        "machine": {"platform": platform.platform(), "cpu": machine.cpu()},
        "ranks": records[0]["ranks"],
        "notes": request.notes,
        "job": asdict(request.job),
        "records": records,
    }


def show(request: Request, config: Config, records: list[dict[str, Any]]) -> None:
    """Print the records as a table."""
    show_tables(title(request, records), request, config, {"": records})


def show_tables(title: str, request: Request, config: Config, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Print the records of each table.

    Args:
        title: first line.
        tables: heading -> records; an empty heading is not printed.
    """
    console = OutputConsole(width=200)  # a narrower terminal breaks lines, rather than cutting numbers
    console.print(Text(f"{title}: {DATA.get(request.job.data, 'from the file')}"))
    console.print(Text(f"ncz: {config.describe()}"))
    for heading, records in tables.items():
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        console.print(records_table(records))
    for note in request.notes:
        console.print(Text(note))
    console.print()
    for name in request.job.peers:
        console.print(Text(f"{name}: {request.contenders[name].description}"))


def title(request: Request, records: list[dict[str, Any]]) -> str:
    """Title: collective, ranks and data."""
    return f"{request.job.collective}, {records[0]['ranks']} ranks, data {request.job.data}"


def _versions() -> dict[str, str]:
    import numpy
    import torch

    found = {"ncz_plugins": __version__, "python": platform.python_version()}
    return found | {"torch": torch.__version__, "numpy": numpy.__version__}
