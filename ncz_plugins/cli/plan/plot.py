"""The picture of `ncz plan --plot`: steps, and the time of a call against the number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace

from ..output import in_a_picture, save_figure
from .show import Plan
from .simulation import calls
from .step import resolved

_COLORS = {"plain": "0.5", "bfloat16": "tab:orange", "compressed": "tab:blue"}
_MOST_RANKS = 4096


def draw(file: str | os.PathLike, plans: list[Plan]) -> None:
    """Write the picture of some plans."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 * len(plans)), layout="constrained")
    for row, (place, setup, steps, _) in zip(figure.subplots(len(plans), 2, squeeze=False), plans):
        _steps(row[0], place.name, steps)
        _ranks(row[1], setup)
    save_figure("--plot", file, figure)


def _steps(axes, name: str, steps) -> None:
    for place, step in enumerate(steps):
        axes.barh(place, step.compute, color=_COLORS[step.kind], alpha=0.5)
        axes.barh(place, step.exposed, left=step.compute, color=_COLORS[step.kind])
        low, middle, high = step.seconds
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3)
    axes.set_yticks(range(len(steps)), [step.kind for step in steps])
    axes.invert_yaxis()
    axes.set(title=f"{in_a_picture(name)}: a step (pale: computing)", xlabel="seconds")


def _ranks(axes, setup) -> None:
    """The largest call of gradients, by schedule."""
    sending = max((each for each in setup.sendings if each.role == "gradient"), key=lambda each: each.nbytes)
    group, workload = setup.group, setup.workload
    itemsize, ratio = sending.itemsize or workload.itemsize, (workload.ratio, workload.ratio_ranks)
    nodes = [2**power for power in range(1, 13) if 2**power * group.ranks_per_node <= _MOST_RANKS]
    config = resolved(setup.config, group).with_transport(min_bytes=0)
    for name in ("ring", "direct"):
        chosen = config.with_transport(schedule=name)
        timed = [
            calls.compressed(replace(group, nodes=n), sending.collective, sending.nbytes, chosen, itemsize, *ratio)
            for n in nodes
        ]
        seconds = [each.seconds for each in timed]
        axes.loglog([n * group.ranks_per_node for n in nodes], seconds, marker="o", markersize=3, label=name)
    plain = [calls.plain(replace(group, nodes=n), sending.collective, sending.nbytes, itemsize).seconds for n in nodes]
    axes.loglog([n * group.ranks_per_node for n in nodes], plain, color="0.5", marker="o", markersize=3, label="plain")
    axes.set(title=f"{sending.collective} of {sending.nbytes / 1e6:.3g} MB", xlabel="ranks", ylabel="seconds")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
