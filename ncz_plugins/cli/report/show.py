"""Printed output of `ncz report`: numbers, verdict, comparison with a plan. Also its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..output import add_row, counted, duration, grid, rounded, shares, size, table
from .planned import Comparison
from .read import Run
from .summary import Summary
from .verdict import Conclusion

_ROLES = {"gradient": "gradients", "parameter": "weights", "activation": "activations"}
_TITLES = {
    "time": "What limited the time",
    "ratio": "What limited the ratio",
    "loss": "What it does to the loss",
    "guard": "What the guard found",
}


def document(
    file: str, run: Run, summary: Summary, conclusions: list[Conclusion], comparison: Comparison | None = None
) -> dict[str, Any]:
    """The document that --json prints."""
    header = run.header.model_dump() if run.header else None
    verdicts = [conclusion._asdict() for conclusion in conclusions]
    which = {"training": run.training, "trainings": run.trainings}
    found = {"file": file, **which, "header": header, "notes": run.notes, **summary.to_dict(), "verdict": verdicts}
    return found if comparison is None else found | {"plan": comparison.to_dict()}


def show(
    console: Console,
    file: str,
    run: Run,
    summary: Summary,
    conclusions: list[Conclusion],
    comparison: Comparison | None = None,
) -> None:
    """Print the numbers, the verdict, and the comparison with a plan if there is one."""
    console.print(Text(f"{file}: {_described(run, summary)}"))
    for note in run.notes:
        console.print(Text(f"note: {note}"))
    console.print()
    console.print(grid(_rows(summary)))
    if summary.bypasses:
        console.print()
        console.print(_bypasses(summary))
    console.print()
    console.print(grid((_TITLES[each.about], each.words) for each in conclusions))
    if comparison is not None:
        console.print()
        console.print(_compared(comparison))
        console.print()
        console.print(grid([("Beside the plan", comparison.words)]))


def _described(run: Run, summary: Summary) -> str:
    header = run.header
    ranks = f", {counted(header.ranks, 'rank')}" if header and header.ranks else ""
    version = f", ncz_plugins {header.ncz_plugins}" if header else ""
    starts = f", started {summary.runs} times" if summary.runs > 1 else ""
    which = f"training {run.training} of {run.trainings}, " if run.trainings > 1 else ""
    steps = f"steps {summary.first:,} to {summary.last:,}" if summary.steps > 1 else f"step {summary.first:,}"
    return f"{which}{steps}{starts}{ranks}{version}; all figures are rank 0's"


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Lines (name, value)."""
    steps, times = summary.steps, summary.times
    partly = summary.bypassed_bytes and summary.compressed_ratio
    of_compressed = f", {summary.compressed_ratio:.2f} for what was compressed" if partly else ""
    yield "ratio", f"{summary.ratio:.2f}{of_compressed}"
    yield "sent per step", f"{size(summary.plain_bytes / steps)} -> {size(summary.wire_bytes / steps)}"
    if len(summary.roles) > 1 or "parameter" in summary.roles:  # else the line above says it
        for role, sent in summary.roles.items():
            ratio = f", ratio {sent.plain_bytes / sent.wire_bytes:.2f}" if sent.wire_bytes else ""
            yield _ROLES.get(role, role), f"{size(sent.plain_bytes / steps)} -> {size(sent.wire_bytes / steps)}{ratio}"
    if summary.sent_whole:
        yield "weights sent whole", ", ".join(f"{count:,} x {reason}" for reason, count in summary.sent_whole.items())
    if summary.local_bytes:
        yield "inside nodes", f"{size(summary.local_bytes / steps)} per step, uncompressed"
    yield (
        "calls per step",
        f"{rounded(summary.calls / steps)}, {rounded(summary.compressed_calls / steps)} of them compressed",
    )
    if times.steps:
        yield "step", f"{duration(times.step)}, the slowest {duration(times.slowest_seconds)} (step {times.slowest})"
        yield "collectives", f"{duration(times.collectives)} per step, {times.share:.1%} of it"
    if times.collectives:
        parts = ("agreeing", "measuring", "encoding", "waiting", "plain", "inside_nodes", "rest")
        shown = (f"{name.replace('_', ' ')} {getattr(times, name):.0%}" for name in parts if getattr(times, name))
        yield "of that", ", ".join(shown)
        yield "beside it", f"decoding {times.decoding:.0%}, where there is a core for it"
    if summary.coders:
        yield "coders", shares(summary.coders)
    if summary.bounds != (1.0, 1.0):
        yield "bounds", " to ".join(f"{b:g}" for b in dict.fromkeys(summary.bounds)) + " times what is configured"
    guard = "nothing was verified (guard.every)"
    if summary.guard:
        guard = f"{counted(summary.guard.verified, 'call')} verified, {counted(summary.guard.alarms, 'alarm')}"
    yield "guard", guard


def _bypasses(summary: Summary) -> Table:
    numbers = ("calls", "per step", "of the bytes sent")
    found = table("went plain because of", *numbers, numbers=numbers)
    for reason, bypassed in summary.bypasses.items():
        share = bypassed.bytes / summary.wire_bytes if summary.wire_bytes else 0
        add_row(found, reason, f"{bypassed.calls:,}", size(bypassed.bytes / summary.steps), f"{share:.0%}")
    return found


def _compared(comparison: Comparison) -> Table:
    numbers = ("planned", "between", "measured")
    found = table("per step", *numbers, numbers=numbers)
    for name, each in comparison.figures.items():
        shown = size if name == "sent" else duration
        ends = "" if each.low is None else f"{shown(each.low)} and {shown(each.high)}"
        add_row(found, name, shown(each.planned), ends, shown(each.measured))
    return found
