"""Printed output of `ncz tune`."""

from __future__ import annotations

from rich.text import Text

from ...core.config import format_size
from ...core.tuning.tuning_file import Tuning
from ..output import add_row, milliseconds, table, unbroken_console


def show(tuning: Tuning, file: str, notes: list[str]) -> None:
    """Print the choices and the measurements behind them, and how a configuration uses the file.

    Args:
        tuning: contents of the tuning file.
        file: path of the tuning file.
        notes: remarks to print after the tables.
    """
    console = unbroken_console()
    console.print(Text(tuning.describe()), soft_wrap=True)
    console.print()
    trials = table("schedule", "frames", "size", "time", "", numbers=("frames", "size", "time"))
    for trial in tuning.trials:
        mark = "chosen" if (trial.schedule, trial.frame_bytes) == (tuning.schedule, tuning.frame_bytes) else ""
        sizes = format_size(trial.frame_bytes), format_size(trial.nbytes)
        add_row(trials, trial.schedule, *sizes, milliseconds(trial.seconds), mark)
    console.print(trials)
    console.print()
    columns = ("size", "plain", "compressed", "times as fast")
    comparisons = table(*columns, "", numbers=columns)
    for each in tuning.comparisons:
        compressed = tuning.min_bytes != "never" and each.nbytes >= tuning.min_bytes
        add_row(
            comparisons,
            format_size(each.nbytes),
            milliseconds(each.plain_seconds),
            milliseconds(each.compressed_seconds),
            f"{each.speed_up:.2f}",
            "compressed" if compressed else "plain",
        )
    console.print(comparisons)
    for note in notes:
        console.print(Text(note))
    console.print()
    costs = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in tuning.costs.model_dump().items())
    console.print(Text(f"picoseconds per value, kernels {tuning.kernels}: {costs}"))
    written = f"""
{file} is written. A configuration takes from it the settings that it leaves open:
transport: {{tuning: {file}, frame_bytes: auto, min_bytes: auto}}"""
    console.print(Text(written), soft_wrap=True)
