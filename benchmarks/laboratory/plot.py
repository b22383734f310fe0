"""Picture of the laboratory: speed-up over plain, against size and against the rate of the link."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from ncz_plugins.cli.perf.plot import draw_lines, draw_sizes
from ncz_plugins.cli.picture import finish, in_a_picture, new_figure, save_figure
from ncz_plugins.core.config import format_size

from .link import bits_per_second


def draw(file: str | os.PathLike, records: list[dict[str, Any]], title: str) -> None:
    """Write the picture of the records of one run. Contenders and sizes are the same on all links."""
    save_figure("--plot", file, partial(figure_of, records, title))


def committed(document: dict[str, Any]) -> Figure:
    """The same of a file that --json has written."""
    [data] = {job["data"] for job in document["jobs"]}
    return figure_of(document["records"], f"all_reduce, {document['ranks']} ranks, data {data}")


def figure_of(records: list[dict[str, Any]], title: str) -> Figure:
    """The picture of the records, with a title."""
    links = sorted(dict.fromkeys(record["link"] for record in records), key=_gbps)
    figure, panels = new_figure(min(2, len(links)), height=4)
    slowest = [record for record in records if record["link"] == links[0]]
    draw_sizes(panels[0], slowest, f"speed-up over plain, {f'link {links[0]}' if links[0] else 'no link'}")
    if len(links) > 1:
        _draw_links(panels[1], records, links)
    figure.suptitle(in_a_picture(title))
    return figure


def _draw_links(axes, records: list[dict[str, Any]], links: list[str]) -> None:
    """Draw the largest size over the rates, at equal distances in ascending order, as "unlimited" is no number."""
    largest = max(record["size"] for record in records)
    ascending = sorted((r for r in records if r["size"] == largest), key=lambda record: _gbps(record["link"]))
    draw_lines(axes, ascending, lambda record: links.index(record["link"]))
    axes.set_xticks(range(len(links)), links)
    axes.set_xlabel("rate of each rank's link")
    finish(axes, f"speed-up over plain, {format_size(largest)}")


def _gbps(link: str | None) -> float:
    return (bits_per_second(link) or float("inf")) / 1e9
