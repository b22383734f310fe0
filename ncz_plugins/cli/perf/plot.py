"""Picture of `ncz perf --plot`: speed-up over plain, against size and against the rate of the link."""

from __future__ import annotations

import os
from typing import Any

from ...core.config import format_size
from ..picture import BLACK, GRAY, finish, in_a_picture, logarithmic, new_figure, save_figure
from .link import bits_per_second

_MIN_SPEED_UP = 1 / 16  # lower end of the picture
_MAX_TICKS = 6
_ROOM = 1.3  # factor from the lines to the ends of the axis


def draw(file: str | os.PathLike, records: list[dict[str, Any]], title: str) -> None:
    """Write the picture of the records of one run. Contenders and sizes are the same on all links."""
    links = list(dict.fromkeys(record["link"] for record in records))
    figure, panels = new_figure(min(2, len(links)), height=4)
    slowest = min(links, key=_gbps)
    of_slowest = [record for record in records if record["link"] == slowest]
    against_size = len({record["size"] for record in records}) > 1
    (_against_size if against_size else _of_one_size)(
        panels[0], of_slowest, f"link {slowest}" if slowest else "no link"
    )
    if len(panels) > 1:
        largest = max(record["size"] for record in records)
        _against_link(panels[1], [r for r in records if r["size"] == largest], links)
    figure.suptitle(in_a_picture(title))
    save_figure("--plot", file, figure)


def _of_one_size(axes, records: list[dict[str, Any]], link: str) -> None:
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
    finish(axes, f"speed-up over plain, {format_size(records[0]['size'])}, {link}")


def _against_size(axes, records: list[dict[str, Any]], link: str) -> None:
    sizes = list(dict.fromkeys(record["size"] for record in records))
    logarithmic(axes.xaxis, base=2)
    _lines(axes, records, lambda record: record["size"])
    ticks = sizes[:: -(-len(sizes) // _MAX_TICKS)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.set_xlabel("size")
    finish(axes, f"speed-up over plain, {link}")


def _against_link(axes, records: list[dict[str, Any]], links: list[str]) -> None:
    """Draw lines over the rates, at equal distances in ascending order, as "unlimited" is no number."""
    ascending = sorted(links, key=_gbps)
    _lines(axes, sorted(records, key=lambda r: _gbps(r["link"])), lambda record: ascending.index(record["link"]))
    axes.set_xticks(range(len(ascending)), ascending)
    axes.set_xlabel("rate of each rank's link")
    finish(axes, f"speed-up over plain, {format_size(records[0]['size'])}")


def _lines(axes, records: list[dict[str, Any]], place) -> None:
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


def _gbps(link: str | None) -> float:
    return (bits_per_second(link) or float("inf")) / 1e9
