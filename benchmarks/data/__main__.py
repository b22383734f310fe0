"""Make the benchmark's data, or say what there is."""

import argparse
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import SETS, load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="sets to make; default: all")
    parser.add_argument("--list", action="store_true", help="only list the sets")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SETS]
    if unknown:
        parser.error(f"no set is called {', '.join(unknown)}; there are {', '.join(SETS)}")
    names = options.names or list(SETS)

    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.list:
        table = Table("name", "description")
        for name in names:
            table.add_row(name, SETS[name].description)
    else:
        table = make(names, console)
    console.print(table)


def make(names: list[str], console: Console) -> Table:
    """Load all sets; seconds are near zero for a set that was kept, or fell out of the run of one above."""
    table = Table("name", "shape", "dtype")
    table.add_column("MB", justify="right")
    table.add_column("seconds", justify="right")
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            start = time.perf_counter()
            x = load(name)
            seconds = time.perf_counter() - start
            table.add_row(name, " x ".join(map(str, x.shape)), str(x.dtype), f"{x.nbytes / 1e6:.1f}", f"{seconds:.1f}")
            progress.advance(task)
    return table


if __name__ == "__main__":
    main()
