"""Printed output of `ncz plan`, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ...version import __version__
from ..output import add_row, counted, duration, grid, significant, size, table
from .step import Setup, Step
from .verdict import Verdict

Plan = tuple[Any, Setup, list[Step], Verdict]  # a Place first


def document(command: str, strategy: str, plans: list[Plan]) -> dict[str, Any]:
    """The document that --json prints."""
    return {
        "ncz_plugins": __version__,
        "command": command,
        "strategy": strategy,
        "plans": [
            {
                "place": place._asdict(),
                "nodes": setup.group.nodes,
                "ranks": setup.group.ranks,
                "latency_seconds": setup.group.link.latency,
                "parameters": setup.workload.parameters,
                "compute_seconds": setup.workload.compute._asdict(),
                "compute_from": setup.workload.how,
                "costs_from": setup.group.costs.source,
                "sendings": [each._asdict() for each in setup.sendings],
                "steps": [_step_document(each) for each in steps],
                "verdict": asdict(verdict),
            }
            for place, setup, steps, verdict in plans
        ],
    }


def _step_document(step: Step) -> dict[str, Any]:
    found = asdict(step) | {"hidden": step.hidden, "seconds": step.seconds._asdict()}
    return found | {"dollars": step.dollars and step.dollars._asdict()}


def show(console: Console, strategy: str, plans: list[Plan]) -> None:
    """Print each plan: its steps, and the verdict."""
    for index, (place, setup, steps, verdict) in enumerate(plans):
        if index:
            console.print()
        group, workload = setup.group, setup.workload
        ranks = f"{group.nodes} x {group.ranks_per_node} ranks" if group.ranks_per_node > 1 else f"{group.nodes} ranks"
        console.print(Text(f"{place.name}: {ranks}, {workload.parameters:,} parameters, {strategy}"))
        console.print()
        console.print(_steps(steps))
        console.print()
        console.print(grid(_lines(place, setup, steps, verdict)))


def _steps(steps: list[Step]):
    headings = ("step", "between", "computing", "exposed", "hidden", "sent", "1,000 steps")
    found = table("gradients", *headings, numbers=headings, gap=2)
    for step in steps:
        low, _, high = step.seconds
        add_row(
            found,
            step.kind,
            duration(step.seconds.middle),
            f"{duration(low)} to {duration(high)}",
            duration(step.compute),
            duration(step.exposed),
            duration(step.hidden),
            size(step.wire_bytes),
            "" if step.dollars is None else _dollars(step.dollars.middle),
        )
    return found


def _dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 10 else f"${amount:.2f}"


def _lines(place, setup: Setup, steps: list[Step], verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "does it pay?", _answer(setup, verdict)
    ours = next(each for each in steps if each.kind == "compressed")
    shown = [f"{name} {each / ours.seconds.middle:.0%}" for name, each in verdict.limits.items()]
    yield "what limits it", f"without it the compressed step would be shorter by: {', '.join(shown)}"
    if verdict.break_even_gbps is None:
        yield "break-even", "it pays on no link, however slow"
    else:
        yield "break-even", f"it pays up to about {significant(verdict.break_even_gbps)} Gbit/s per node"
    if verdict.paying_ranks is None:
        yield "ranks", "it pays with no number of ranks"
    else:
        low, high = verdict.paying_ranks
        which = f"from {low:,} to {high:,} ranks" if low < high else f"with {counted(low, 'rank')} only"
        yield "ranks", f"it pays {which}, of powers of two that were tried"
    yield "the loss", verdict.loss
    yield "computing from", setup.workload.how
    yield "costs from", " ".join(setup.group.costs.source.split())
    if place.source:
        yield "machine from", place.source


def _answer(setup: Setup, verdict: Verdict) -> str:
    times = f"{verdict.speed_up:.2f} times as fast as {verdict.against}"
    if verdict.pays == "yes":
        return f"yes: {times}"
    if verdict.pays == "perhaps":
        return f"perhaps: {times}, which is within the error of the prediction: measure with `ncz perf`"
    if verdict.break_even_gbps is None:
        change = "more would have to be sent for each second of computing"
    else:
        change = f"a link of {significant(verdict.break_even_gbps)} Gbit/s or slower would change that"
    return f"don't: {times}; {change}"
