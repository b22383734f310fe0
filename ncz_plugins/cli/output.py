"""Output of all commands: numbers, tables, JSON and files. Pictures are in `picture`.

Nothing here imports torch. matplotlib is imported only to check the name of a picture.
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
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..core import whole_files
from ..core.errors import ConfigError, UnsupportedError
from ..core.json_numbers import finite
from ..core.whole_files import target_of, write_whole

_UNBROKEN_COLUMNS = 10_000  # width of output that goes to no terminal
_DEFAULT_FORMAT = "png"  # of a picture whose name has no ending
_SENTENCE_COLUMNS = 92  # width of the values in a grid

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
    """counted(1, "alarm") is "1 alarm", counted(1234, "alarm") is "1,234 alarms"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def milliseconds(seconds: float) -> str:
    """0.0123 is "12.30 ms": for columns of times in one unit."""
    return f"{1e3 * seconds:.2f} ms"


def significant(number: float) -> str:
    """Three significant digits or more, never an exponent: 0.01234 is "0.0123", 1234.5 is "1234"."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def rounded(number: float) -> str:
    """At most two decimals: 3 is "3", 12345.678 is "12,345.68"."""
    return f"{round(number, 2):,.15g}"


def shares(counts: dict[str, int] | None) -> str:
    """Share of each name: {"rans": 3, "fixed": 1} is "rans 75% fixed 25%", {"rans": 3} is "rans"."""
    if not counts:
        return ""
    if len(counts) == 1:
        return next(iter(counts))
    total = sum(counts.values())
    return " ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())


def yaml_value(value: object) -> str:
    """The value of a setting as YAML has it; policies in a few words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(each if isinstance(each, str) else each.describe() for each in value)}]"
    return str(value)


def scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """`value` with three digits, in the largest unit that makes it 1 or more; 0 below 0.001 of the smallest unit.

    Args:
        units: names and sizes, the largest first.
    """
    value = float(f"{value:.3g}")  # so that 0.9999 s becomes "1 s", not "1000 ms"
    name, unit = next(((name, unit) for name, unit in units if value >= unit), units[-1])
    digits = float(f"{value / unit:.3g}")
    return f"{digits if digits >= 1e-3 else 0:.15g} {name}"  # 15 digits: never an exponent


# ------------------------------------------------------------------ tables


class OutputConsole(Console):
    """Console for stdout.

    Rich pads all lines of a table to the same width; without a terminal this console removes the padding. If the reader
    closes the pipe, it raises BrokenPipeError for `main` to handle, where rich would end the process with exit code 1.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal or sys.stdout is None:
            return super().print(*objects, **options)
        with self.capture() as captured:
            super().print(*objects, **options)
        print("\n".join(line.rstrip() for line in captured.get().split("\n")), end="", file=self.file, flush=True)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich has just caught


def unbroken_console() -> Console:
    """A console that breaks lines at the width of the terminal, and not at all in a pipe or file."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return OutputConsole(width=None if on_terminal else _UNBROKEN_COLUMNS)


def table(
    *headings: str,
    numbers: Collection[str] = (),
    gap: int = 1,
    no_wrap: bool = False,
    vertical: Literal["top", "bottom"] = "top",
) -> Table:
    """A table without lines.

    Args:
        headings: heading of each column.
        numbers: headings of columns of numbers, which are right-aligned.
        gap: spaces between columns.
        no_wrap: whether cells stay on one line.
        vertical: alignment of headings that have fewer lines than others.
    """
    found = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0) if gap > 1 else (0, 1))
    for heading in headings:
        found.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=no_wrap, vertical=vertical)
    return found


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text. Rich would read "[...]" in a bare string as markup."""
    table.add_row(*map(Text, cells))


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    """Lines (name, value), names in bold. Long values are wrapped, but no word is broken."""
    rows = list(rows)
    longest_word = max((len(word) for _, value in rows for word in value.split()), default=0)
    found = Table.grid(padding=(0, 2))
    found.add_column(no_wrap=True)
    found.add_column(max_width=max(_SENTENCE_COLUMNS, longest_word))
    for name, value in rows:
        found.add_row(Text(name, style="bold"), Text(value))
    return found


def progress_bar() -> Progress:
    """A bar on stderr, if that is a terminal. It vanishes at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    silent = sys.stderr is None or not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=silent)


# ------------------------------------------------------------------ commands with subcommands


def list_commands(parser: argparse.ArgumentParser) -> None:
    """Have `parser` print its help and exit with 2 if none of its subcommands is given."""

    def run(options: argparse.Namespace) -> None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)

    parser.set_defaults(run=run, outputs={})


# ------------------------------------------------------------------ JSON and files


def print_json(document: Any) -> None:
    """Print `document`, made of JSON types, with null in place of NaN and infinity."""
    print(json.dumps(finite(document), indent=2, allow_nan=False))


def write_file(option: str, file: str | os.PathLike, data: bytes | str) -> None:
    """Write the file that an option names. Raises UnsupportedError, naming option and file."""
    with naming(option, file):
        write_whole(file, data)


def is_plain(file: str | os.PathLike) -> bool:
    """Whether `file` is a regular file or a folder. Only then does the ending of its name mean anything."""
    try:
        return target_of(file).is_plain
    except OSError:
        return True


def require_writable(option: str, file: str | os.PathLike) -> None:
    """Raise UnsupportedError if the file that an option names can't be written. For use before any work is done."""
    try:
        whole_files.require_writable(file)
    except OSError as error:
        raise UnsupportedError(f"{option} {os.fspath(file)}: {error.strerror}") from None


def require_picture(option: str, file: str | os.PathLike) -> None:
    """Raise UnsupportedError if matplotlib can't write the picture that an option names. For use before any work.

    The ending of the name is the format, and regular files must have one. Other files without an ending get a PNG.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UnsupportedError(f"{option} needs matplotlib: pip install 'ncz_plugins[plot]'") from None
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    ending = _ending(file)
    if ending not in formats and (ending or is_plain(file)):
        endings = ", ".join(f".{each}" for each in formats)
        raise UnsupportedError(f"{option} {os.fspath(file)}: the name must end in one of {endings}")
    require_writable(option, file)


def picture_format(file: str | os.PathLike) -> str:
    """Format of a picture by the name of its file, such as "png"."""
    return _ending(file) or _DEFAULT_FORMAT


def _ending(file: str | os.PathLike) -> str:
    """Ending of a file name in lower case, without the dot."""
    return Path(file).suffix.lower().removeprefix(".")


@contextmanager
def messages_apart(outputs: dict[str, str | None], has_json: bool) -> Iterator[None]:
    """Context manager that sends printed text to stderr if an output file is standard output.

    Args:
        outputs: option -> file to write; None if the option is not given.
        has_json: whether the command prints JSON.

    Raises ConfigError if several outputs would go to standard output.
    """
    on_stdout = [f"{name} {file}" for name, file in outputs.items() if file is not None and _is_standard_output(file)]
    if on_stdout and has_json:
        on_stdout.append("--json")
    if len(on_stdout) > 1:
        raise ConfigError(f"{' and '.join(on_stdout)} would all go to standard output: give files for all but one")
    with redirect_stdout(sys.stderr) if on_stdout else nullcontext():
        yield


def _is_standard_output(file: str) -> bool:
    try:
        return target_of(file).is_standard_output
    except OSError:
        return False


@contextmanager
def naming(option: str, file: str | os.PathLike) -> Iterator[None]:
    """Context manager that turns OSError into UnsupportedError, which names the option and its file."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(f"{option} {os.fspath(file)}: cannot be written: {error.strerror or error}") from None
