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
from .contenders import CONTENDERS
from .job import DATA
from .request import Request
from .table import records_table

_PACKAGES = ("horovod", "hivemind", "zstandard", "lz4")  # used by contenders: their versions are reported


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
        "ranks_per_node": request.ranks.per_node,
        "notes": request.notes,
        "jobs": [asdict(job) for job in request.jobs],
        "records": records,
    }


def show(request: Request, config: Config, records: list[dict[str, Any]]) -> None:
    """Print the records as tables."""
    console = OutputConsole(width=200)  # a narrower terminal breaks lines, rather than cutting numbers
    job = request.jobs[0]
    console.print(Text(f"{title(request, records)}: {DATA.get(job.data, 'from the file')}"))
    console.print(Text(f"ncz: {config.describe()}"))
    for job in request.jobs:
        console.print()
        if job.link:
            console.print(Text(f"link {job.link}", style="bold"))
        console.print(records_table([record for record in records if record["link"] == job.link]))
    for note in request.notes:
        console.print(Text(note))
    console.print()
    for name in job.peers:
        console.print(Text(f"{name}: {CONTENDERS[name].description}"))


def title(request: Request, records: list[dict[str, Any]]) -> str:
    """Title: collective, ranks and data."""
    job, per_node = request.jobs[0], request.ranks.per_node
    per_node = f", {per_node} to a node" if per_node > 1 else ""
    return f"{job.collective}, {records[0]['ranks']} ranks{per_node}, data {job.data}"


def _versions() -> dict[str, str]:
    import numpy
    import torch

    found = {"ncz_plugins": __version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "numpy": numpy.__version__}
    return found | {name: version for name in _PACKAGES if (version := machine.installed_version(name))}
