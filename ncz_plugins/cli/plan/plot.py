"""Picture of `ncz plan --plot`: the steps, and the time of a call against the number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from ..output import counted, duration, size
from ..picture import (
    COLORS,
    finish,
    in_a_picture,
    in_seconds,
    ink,
    logarithmic,
    new_figure,
    save_figure,
)
from .show import Plan
from .simulation import calls
from .step import resolved

_MOST_RANKS = 1024  # simulated in seconds; `benchmarks.plan simulate` goes on to 16,384


def draw(file: str | os.PathLike, plans: list[Plan]) -> None:
    """Write the picture of all plans, two panels each."""
    save_figure("--plot", file, partial(_figure, plans))


def _figure(plans: list[Plan]) -> Figure:
    figure, panels = new_figure(2 * len(plans))
    for at, (place, setup, steps, _) in enumerate(plans):
        _steps(panels[2 * at], place.name, steps)
        _ranks(panels[2 * at + 1], setup, place.name)
    return figure


def _steps(axes, name: str, steps) -> None:
    for place, step in enumerate(steps):
        low, middle, high = step.seconds
        axes.barh(place, step.compute, color=COLORS[step.kind], alpha=0.4)
        axes.barh(place, step.exposed, left=step.compute, color=COLORS[step.kind])
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color=ink(), capsize=3)
        axes.annotate(f" {duration(middle)}", (high, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(steps)), [step.kind for step in steps])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(step.seconds.high for step in steps) or 1)
    axes.grid(visible=False, axis="y")
    in_seconds(axes.xaxis)
    finish(axes, f"{in_a_picture(name)}: a step (pale: computing)")


def _ranks(axes, setup, name: str) -> None:
    """Draw the time of the largest call of gradients, by schedule, against the number of ranks."""
    sending = max((each for each in setup.sendings if each.role == "gradient"), key=lambda each: each.nbytes)
    group, workload = setup.group, setup.workload
    itemsize, ratio = sending.itemsize or workload.itemsize, (workload.ratio, workload.ratio_ranks)
    powers = [2**power for power in range(1, 15) if 2**power * group.ranks_per_node <= _MOST_RANKS]
    nodes = sorted({group.nodes, *powers})
    ranks = [n * group.ranks_per_node for n in nodes]
    config = resolved(setup.config, group).with_transport(min_bytes=0)
    on_gpu = group.costs.kind == "gpu"
    for schedule in ("ring", "direct", *(() if on_gpu else ["halving"])):
        chosen = config.with_transport(schedule=schedule)
        timed = [
            calls.compressed(replace(group, nodes=n), sending.collective, sending.nbytes, chosen, itemsize, *ratio)
            for n in nodes
        ]
        seconds = [each.seconds for each in timed]
        axes.plot(ranks, seconds, marker="o", markersize=4, label=schedule, color=COLORS[schedule])
    plain = [calls.plain(replace(group, nodes=n), sending.collective, sending.nbytes, itemsize).seconds for n in nodes]
    axes.plot(ranks, plain, color=COLORS["plain"], marker="o", markersize=4, label="plain")
    planned = group.nodes * group.ranks_per_node
    axes.axvline(planned, color=ink(), linestyle=":", label=f"planned: {counted(planned, 'rank')}")
    logarithmic(axes.xaxis, base=2)
    logarithmic(axes.yaxis)
    in_seconds(axes.yaxis)
    axes.set_xlabel("ranks")
    finish(axes, f"{in_a_picture(name)}: {sending.collective} of {size(sending.nbytes)}", columns=5)
