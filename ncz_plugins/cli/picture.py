"""Style of all pictures: figures readable on a phone, room above the curves, ticks with units.

Imports matplotlib, so only modules that draw import this.
"""

from __future__ import annotations

import io
import math
import os
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from .output import picture_format, scaled, size, write_file

WIDTH = 6.4  # inches: on a phone's screen, text of 10 points stays readable
BLACK, GRAY, BLUE, ORANGE, GREEN, RED = "0.15", "0.6", "#1f77b4", "#e8811a", "#2a9d3a", "#d62f2f"

_ROOM = 1.15  # factor from the highest curve to the end of the axis
_LEGEND_LINE_POINTS = 17  # height of one line of a legend
_FEW_DECADES = 2.5  # a shorter logarithmic axis has ticks at 2 and 5, too
_TIMES = (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def new_figure(panels: int, height: float = 2.9, share_x: bool = False) -> tuple[Figure, list[Any]]:
    """A figure with panels below each other, each `height` inches high."""
    figure = Figure(figsize=(WIDTH, 0.4 + panels * height), layout="constrained", facecolor="white")
    found = figure.subplots(panels, 1, sharex=share_x, squeeze=False)[:, 0]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRAY)
        axes.tick_params(color=GRAY)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure, list(found)


def finish(axes, title: str, columns: int = 3, empty: str = "") -> None:
    """Set a title, and a legend between title and axes, where it hides no curve.

    Args:
        columns: columns of the legend.
        empty: text shown in place of curves if there are none.
    """
    labels = axes.get_legend_handles_labels()[1]
    lines = math.ceil(len(labels) / columns)
    if lines:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1),
            ncols=columns,
            frameon=False,
            borderaxespad=0,
            columnspacing=1.2,
        )
    axes.set_title(title, loc="left", fontsize="large", pad=6 + lines * _LEGEND_LINE_POINTS)
    if not axes.has_data():
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", color=GRAY)
        axes.set_yticks([])


def from_zero(axes) -> None:
    """Start the vertical axis at zero, and leave room above the highest curve."""
    top = axes.dataLim.y1
    axes.set_ylim(0, _ROOM * top if math.isfinite(top) and top > 0 else 1)


def logarithmic(axis, base: int = 10) -> None:
    """Make an axis logarithmic, with few ticks and plain numbers."""
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log", base=base)
    low, high = sorted(getattr(axis.axes, f"get_{name}lim")())
    few = base == 10 and 0 < low and math.log10(high / low) < _FEW_DECADES
    axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if few else (1,), numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def in_bytes(axis) -> None:
    """Ticks such as "80 MB"."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: size(value) if value else "0"))


def in_seconds(axis) -> None:
    """Ticks such as "20 ms"."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, _TIMES) if value else "0"))


def whole_numbers(axis) -> None:
    """Ticks at whole numbers only, even if the axis shows a single value."""
    low, high = axis.get_view_interval()
    if high - low < 1:
        axis.set_view_interval(low - 1, high + 1)
    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def plain(value: float) -> str:
    """A number without exponent or trailing zeros: "0.25", "1,000"."""
    return f"{value:,.12f}".rstrip("0").rstrip(".")


def save_figure(option: str, file: str | os.PathLike, figure: Figure) -> None:
    """Write a figure to the file that an option names. Raises UnsupportedError, naming option and file."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=picture_format(file))
    write_file(option, file, picture.getvalue())


def in_a_picture(text: str) -> str:
    """Escape text that may contain anything, such as a file name, so that matplotlib shows it unchanged."""
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")
