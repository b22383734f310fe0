"""Picture of `ncz perf --plot`: speed-up over plain, against size."""

from __future__ import annotations

import os
from typing import Any

from ...core.config import format_size
from ..picture import BLACK, GRAY, finish, in_a_picture, logarithmic, new_figure, save_figure

_MIN_SPEED_UP = 1 / 16  # lower end of the picture
_MAX_TICKS = 6
_ROOM = 1.3  # factor from the lines to the ends of the axis


def draw(file: str | os.PathLike, records: list[dict[str, Any]], title: str) -> None:
    """Write the picture of the records of one run."""
    figure, [axes] = new_figure(1, height=4)
    draw_sizes(axes, records, "speed-up over plain")
    figure.suptitle(in_a_picture(title))
    save_figure("--plot", file, figure)


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
    for place, record in enumerate(records):
        axes.barh(place, record["speedup"], color=BLACK if record["peer"] == "ncz" else GRAY)
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
            fewer = [r["ratio"] for r in own]
            axes.plot([place(r) for r in own], fewer, color=BLACK, linestyle="--", label=f"times fewer bytes, {name}")
    drawn = [value for record in records for value in (record["speedup"], record["ratio"]) if value]
    axes.set_ylim(max(_MIN_SPEED_UP, min(0.5, min(drawn) / _ROOM)), _ROOM * max(2, *drawn))
    logarithmic(axes.yaxis, base=2)


def _styles(names) -> dict[str, dict[str, Any]]:
    """Style of each contender. Colours repeat with other markers."""
    from matplotlib import colormaps

    colors = [color for at, color in enumerate(colormaps["tab10"].colors) if at != 7]  # 7 is gray
    styles = {"plain": {"color": GRAY, "marker": "o"}, "ncz": {"color": BLACK, "marker": "o", "linewidth": 2.5}}
    others = [name for name in names if name not in styles]
    for at, name in enumerate(others):
        styles[name] = {"color": colors[at % len(colors)], "marker": "osD^"[at // len(colors) % 4], "markersize": 4}
    return {name: styles[name] for name in names}
