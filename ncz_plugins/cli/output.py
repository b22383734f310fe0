"""What all commands share for their output: sizes, durations, tables, JSON and files. Pictures: `picture`.

Nothing here imports torch, and matplotlib only where a picture is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import whole_files
from ..core.errors import ConfigError, UnsupportedError
from ..core.json_numbers import finite
from ..core.whole_files import target_of, write_whole

_NO_BREAKS = 10_000  # columns, where no screen is looked at
_PICTURE = "png"  # the kind of picture where no name says it
_READABLE = 92  # columns of a sentence beside its name

# ------------------------------------------------------------------ numbers


def size(nbytes: float) -> str:
    """1234567 is "1.23 MB"."""
    return scaled(nbytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def duration(seconds: float) -> str:
    """0.0123 is "12.3 ms"."""
    return scaled(seconds, (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("us", 1e-6)))


def bit_rate(bits_per_second: float) -> str:
    """1.6e9 is "1.6 Gbit/s"."""
    units = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1))
    return scaled(bits_per_second, units)


def counted(count: int, noun: str) -> str:
    """1 is "1 alarm", 1234 is "1,234 alarms"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def milliseconds(seconds: float) -> str:
    """0.0123 is "12.30 ms": for columns of times, which all have the same unit."""
    return f"{1e3 * seconds:.2f} ms"


def significant(number: float) -> str:
    """With at least three significant digits, and never as a power of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def rounded(number: float) -> str:
    """With two digits behind the point at most: 3 is "3", 12345.678 is "12,345.68"."""
    return f"{round(number, 2):,.15g}"


def shares(counts: dict[str, int] | None) -> str:
    """Each name's share of the total: "rans", or "rans 75% fixed 25%"."""
    if not counts:
        return ""
    if len(counts) == 1:
        return next(iter(counts))
    total = sum(counts.values())
    return " ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())


def yaml_value(value: object) -> str:
    """A value of a setting as it would stand in a YAML file; policies and the like in a few words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(each if isinstance(each, str) else each.describe() for each in value)}]"
    return str(value)


def scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """`value` with three digits, in the largest unit of which there is at least one; 0 below 0.001 of the smallest."""
    value = float(f"{value:.3g}")  # so that 0.9999 s are 1 s, and not a thousand milliseconds
    name, unit = next(((name, unit) for name, unit in units if value >= unit), units[-1])
    digits = float(f"{value / unit:.3g}")
    return f"{digits if digits >= 1e-3 else 0:.15g} {name}"  # of which none is written as a power of ten


# ------------------------------------------------------------------ tables


class OutputConsole(Console):
    """A console for stdout.

    Rich pads each line of a table to the width of the longest one. Without a terminal these blanks are left out. A
    reader may go: BrokenPipeError is then for `main`, where rich's own console would end the process with 1.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal or sys.stdout is None:
            return super().print(*objects, **options)
        with self.capture() as captured:
            super().print(*objects, **options)
        print("\n".join(line.rstrip() for line in captured.get().split("\n")), end="", file=self.file, flush=True)

    def on_broken_pipe(self) -> None:
        raise  # what rich has just caught


def unbroken_console() -> Console:
    """A console that breaks lines at the edge of a terminal only: what a pipe or a file takes need not fit a screen."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return OutputConsole(width=None if on_terminal else _NO_BREAKS)


def table(
    *headings: str,
    numbers: Collection[str] = (),
    gap: int = 1,
    no_wrap: bool = False,
    vertical: Literal["top", "bottom"] = "top",
) -> Table:
    """A table without lines.

    Args:
        numbers: which of the headings are above numbers; these columns are aligned to the right.
        gap: spaces between columns.
        no_wrap: whether cells stay on one line.
        vertical: where the shorter ones of the headings stand.
    """
    found = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0) if gap > 1 else (0, 1))
    for heading in headings:
        found.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=no_wrap, vertical=vertical)
    return found


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text. A bare string would not do: rich takes "[...]" in it for markup."""
    table.add_row(*map(Text, cells))


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    """(name, value) lines, with the names in bold. Long values take several lines, but no word is broken."""
    rows = list(rows)
    longest_word = max((len(word) for _, value in rows for word in value.split()), default=0)
    found = Table.grid(padding=(0, 2))
    found.add_column(no_wrap=True)
    found.add_column(max_width=max(_READABLE, longest_word))
    for name, value in rows:
        found.add_row(Text(name, style="bold"), Text(value))
    return found


# ------------------------------------------------------------------ commands of commands


def list_commands(parser: argparse.ArgumentParser) -> None:
    """Have a parser whose commands are other parsers' show them, and end with 2, where none is given."""

    def run(options: argparse.Namespace) -> None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)

    parser.set_defaults(run=run, outputs={})


# ------------------------------------------------------------------ JSON and files


def print_json(document: Any) -> None:
    """Print `document`, of JSON types, with null in place of NaN and infinity."""
    print(json.dumps(finite(document), indent=2, allow_nan=False))


def write_file(option: str, file: str | os.PathLike, data: bytes | str) -> None:
    """Write the file that an option of the command line names. Raises UnsupportedError, which names both."""
    with naming(option, file):
        write_whole(file, data)


def is_plain(file: str | os.PathLike) -> bool:
    """Whether a plain file is meant, or a folder: standard output, FIFOs and devices have names without a meaning."""
    try:
        return target_of(file).is_plain
    except OSError:
        return True


def require_writable(option: str, file: str | os.PathLike) -> None:
    """Raise UnsupportedError, before any work, if what an option names is a folder, or no file can be made there."""
    try:
        whole_files.require_writable(file)
    except OSError as error:
        raise UnsupportedError(f"{option} {os.fspath(file)}: {error.strerror}") from None


def require_picture(option: str, file: str | os.PathLike) -> None:
    """Raise UnsupportedError, before any work, if matplotlib can't write the picture that an option names.

    The ending of a plain file's name says which kind of picture it is. Elsewhere a name without an ending is a PNG.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UnsupportedError(f"{option} needs matplotlib: pip install 'ncz_plugins[plot]'") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    ending = _ending(file)
    if ending not in kinds and (ending or is_plain(file)):
        endings = ", ".join(f".{kind}" for kind in kinds)
        raise UnsupportedError(f"{option} {os.fspath(file)}: allowed are names in {endings}")
    require_writable(option, file)


def picture_format(file: str | os.PathLike) -> str:
    """The kind of picture that a file's name asks for, such as "png"."""
    return _ending(file) or _PICTURE


def _ending(file: str | os.PathLike) -> str:
    """The ending of a file's name without its dot, in lower case."""
    return Path(file).suffix.lower().removeprefix(".")


@contextmanager
def messages_apart(outputs: dict[str, str | None], has_json: bool) -> Iterator[None]:
    """Print on standard error what is printed, if one of the outputs goes to standard output.

    Args:
        outputs: the files to write, by what names them on the command line.
        has_json: whether `--json` has the command print JSON.

    Raises ConfigError if several things would go to standard output.
    """
    there = [f"{name} {file}" for name, file in outputs.items() if file is not None and _is_standard_output(file)]
    if there and has_json:
        there.append("--json")
    if len(there) > 1:
        raise ConfigError(f"{' and '.join(there)} would all go to standard output: name a file instead of all but one")
    with redirect_stdout(sys.stderr) if there else nullcontext():
        yield


def _is_standard_output(file: str) -> bool:
    try:
        return target_of(file).is_standard_output
    except OSError:
        return False


@contextmanager
def naming(option: str, file: str | os.PathLike) -> Iterator[None]:
    """In place of an OSError from writing the file that an option names, raise UnsupportedError, which names both."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(f"{option} {os.fspath(file)}: cannot be written: {error.strerror or error}") from None
