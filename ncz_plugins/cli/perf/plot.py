"""The picture of `ncz perf --plot`: how much faster than plain, against the size and against the link's rate."""

from __future__ import annotations

import os
from typing import Any

from ...core.config import format_size
from ..output import in_a_picture, save_figure
from .link import bits_per_second

_LOWEST = 1 / 16  # the picture ends here: nobody would use what is slower


def draw(file: str | os.PathLike, records: list[dict[str, Any]], title: str) -> None:
    """Write the picture of the records of one run, whose contenders and sizes are the same on every link."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(record["link"] for record in records))
    figure = Figure(figsize=(9 if len(links) == 1 else 14, 5), layout="constrained")
    slowest = min(links, key=_gbps)
    against_size, *against_link = figure.subplots(1, min(2, len(links)), sharey=True, squeeze=False)[0]
    _against_size(against_size, [r for r in records if r["link"] == slowest])
    if against_link:
        largest = max(record["size"] for record in records)
        _against_link(against_link[0], [r for r in records if r["size"] == largest], links)
    against_size.set_ylabel("speed-up over plain")
    against_size.set_ylim(bottom=max(_LOWEST, against_size.get_ylim()[0]))
    figure.legend(*against_size.get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(in_a_picture(title))
    save_figure("--plot", file, figure)


def _against_size(axes, records: list[dict[str, Any]]) -> None:
    link = records[0]["link"]
    _lines(axes, records, lambda record: record["size"])
    axes.set(xlabel="size", title=f"link {link}" if link else "the network as it is")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))


def _against_link(axes, records: list[dict[str, Any]], links: list[str]) -> None:
    """Rates are spread evenly, in ascending order, as "unlimited" has no place on a scale."""
    ascending = sorted(links, key=_gbps)
    _lines(axes, sorted(records, key=lambda r: _gbps(r["link"])), lambda record: ascending.index(record["link"]))
    axes.set_xticks(range(len(ascending)), ascending)
    axes.set(xlabel="rate of each rank's link", title=format_size(records[0]["size"]))


def _lines(axes, records: list[dict[str, Any]], place) -> None:
    """A line for each contender, and for ours the bound: as many times faster as it sends fewer bytes."""
    from matplotlib import colormaps

    contenders = dict.fromkeys(record["peer"] for record in records)
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for name in contenders:
        own = [record for record in records if record["peer"] == name]
        style = {"plain": {"color": "0.5"}, "ncz": {"color": "black", "linewidth": 2, "zorder": 3}}.get(name, {})
        axes.plot([place(r) for r in own], [r["speedup"] for r in own], "o-", label=name, **style)
        if own[0]["ratio"]:
            axes.plot(
                [place(r) for r in own],
                [r["ratio"] for r in own],
                color="black",
                linestyle="--",
                label=f"bound: the ratio of {name}",
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def _gbps(link: str | None) -> float:
    return (bits_per_second(link) or float("inf")) / 1e9
