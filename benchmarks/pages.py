"""What all benchmarks write: a file of figures, and tables between the marks of a page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from ncz_plugins.cli import machine
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[1]
MARKS = "<!-- figures -->", "<!-- end of figures -->"


def put_into(page: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Replace what stands between the marks of a page."""
    before, _, rest = page.read_text().partition(marks[0])
    page.write_text(before + "\n".join([marks[0], text, marks[1]]) + rest.partition(marks[1])[2])


def write_figures(name: str, command: list[str], versions: dict[str, str], folder: Path | None, **found) -> Path:
    """Write what a benchmark found, how, and on what machine. Returns the file.

    Args:
        versions: of packages besides our own and torch.
        folder: None: that of the committed results.
    """
    import torch  # not at the top: programs that only write pages start sooner

    document = {
        "command": shlex.join(command),
        "versions": {"ncz_plugins": __version__, "torch": torch.__version__, **versions},
        "cpu": machine.cpu(),
        **found,
    }
    path = (folder or ROOT / "benchmarks" / "results") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
