"""Picture of `ncz perf --plot`: speed-up over plain, against size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from ...core.config import format_size
from ..picture import BLUE, OTHERS, color_of, finish, in_a_picture, logarithmic, new_figure, save_figure

_MIN_SPEED_UP = 1 / 16  # lower end of the picture
_MAX_TICKS = 6
_ROOM = 1.3  # factor from the lines to the ends of the axis


def draw(file: str | os.PathLike, records: list[dict[str, Any]], title: str) -> None:
    """Write the picture of the records of one run."""
    save_figure("--plot", file, partial(_figure, records, title))


def _figure(records: list[dict[str, Any]], title: str) -> Figure:
    figure, [axes] = new_figure(1, height=4)
    draw_sizes(axes, records, "speed-up over plain")
    figure.suptitle(in_a_picture(title))
    return figure


def draw_sizes(axes, records: list[dict[str, Any]], heading: str) -> None:
    """Draw lines over the sizes, or a bar for each contender if there is one size."""
    sizes = list(dict.fromkeys(record["size"] for record in records))
    if len(sizes) == 1:
        _draw_bars(axes, records, f"{heading}, {format_size(sizes[0])}")
        return
    logarithmic(axes.xaxis, base=2)
    draw_lines(axes, records, lambda record: record["size"])
    ticks = sizes[:: -(-len(sizes) // _MAX_TICKS)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.set_xlabel("size")
    finish(axes, heading)


def _draw_bars(axes, records: list[dict[str, Any]], heading: str) -> None:
    """Draw a bar for each contender."""
    styles = _styles(dict.fromkeys(record["peer"] for record in records))
    for place, record in enumerate(records):
        axes.barh(place, record["speedup"], color=styles[record["peer"]]["color"])
        axes.annotate(
            f"{record['speedup']:.2f}", (record["speedup"], place), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(records)), [record["peer"] for record in records])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(record["speedup"] for record in records))
    axes.grid(visible=False, axis="y")
    finish(axes, heading)


def draw_lines(axes, records: list[dict[str, Any]], place) -> None:
    """Draw a line for each contender, and a dashed line with the compression ratio of ours.

    The speed-up may exceed the ratio: plain calls may not fill the link, and our messages for small plain tensors are
    faster.
    """
    for name, style in _styles(dict.fromkeys(record["peer"] for record in records)).items():
        own = [record for record in records if record["peer"] == name]
        axes.plot([place(r) for r in own], [r["speedup"] for r in own], label=name, **style)
        if own[0]["ratio"]:
            fewer, dashed = [r["ratio"] for r in own], {"color": style["color"], "linestyle": "--"}
            axes.plot([place(r) for r in own], fewer, **dashed, label=f"times fewer bytes, {name}")
    drawn = [value for record in records for value in (record["speedup"], record["ratio"]) if value]
    axes.set_ylim(max(_MIN_SPEED_UP, min(0.5, min(drawn) / _ROOM)), _ROOM * max(2, *drawn))
    logarithmic(axes.yaxis, base=2)


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Style of each contender. A colour that several have comes with other markers."""
    others, used, styles = cycle(OTHERS), Counter(), {}
    for name in names:
        color = color_of(name) or next(others)
        styles[name] = {"color": color, "marker": "osD^v"[used[color] % 5], "markersize": 5}
        used[color] += 1
    return styles | {"ncz": {"color": BLUE, "marker": "o", "linewidth": 2.5}} if "ncz" in styles else styles
