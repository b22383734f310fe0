"""Style of all pictures: figures readable on a phone, room above the curves, ticks with units, light or dark.

Imports matplotlib, so only modules that draw import this. They hand a function to `save_figure` or `rendered`, as the
colours of text, axes and background are those of the scheme in which it is called.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from typing import Any

from matplotlib import cycler, rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from .output import picture_format, scaled, size, write_file

WIDTH = 6.4  # inches: on a phone's screen, text of 10 points stays readable

# Each stands out from white and from dark gray alike, by a contrast of at least 3.
GRAY, BLUE, ORANGE, GREEN = "#8a8a8a", "#2582d0", "#e0690c", "#119b70"
RED, PURPLE, TEAL, BROWN = "#dd4258", "#a868c8", "#1495b0", "#9d7440"
OTHERS = PURPLE, TEAL, BROWN, RED  # of what has no colour below
COLORS = {  # of what pictures compare
    "plain": GRAY,
    **dict.fromkeys(("ncz", "ncclz", "compressed", "default", "balanced", "auto"), BLUE),
    **dict.fromkeys(("fp16", "bf16", "bfloat16"), ORANGE),
    **dict.fromkeys(("fp8", "int8", "hivemind"), GREEN),  # 8 bits
    **{"powersgd": PURPLE, "zstd": BROWN, "lz4": TEAL, "horovod": RED},
    **{"bits": PURPLE, "accurate": TEAL, "small": BROWN, "former": RED, "weights too": PURPLE},
    **{"direct": BLUE, "ring": TEAL, "halving": PURPLE, "hierarchy": RED},  # schedules
    **{"raw": BROWN, "fixed": PURPLE, "huffman": TEAL, "rans": RED},  # coders
}

_ROOM = 1.15  # factor from the highest curve to the end of the axis
_LEGEND_LINE_POINTS = 17  # height of one line of a legend
_FEW_DECADES = 2.5  # a shorter logarithmic axis has ticks at 2 and 5, too
_TIMES = (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_COMMON = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=OTHERS),
}


def _scheme(paper: str, ink: str, axes: str, grid: str) -> dict[str, Any]:
    """Settings of matplotlib."""
    keys = {
        paper: ("figure.facecolor", "axes.facecolor"),
        ink: ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
        axes: ("axes.edgecolor", "xtick.color", "ytick.color"),
        grid: ("grid.color",),
    }
    return _COMMON | {key: color for color, some in keys.items() for key in some}


LIGHT = _scheme("#ffffff", "#26282d", "#999999", "#e5e5e5")
DARK = _scheme("#1e2129", "#dcdee4", "#80838c", "#383c46")  # on the background that the site has in its dark scheme


def ink() -> str:
    """The colour of text in the scheme."""
    return rcParams["text.color"]


def paper() -> str:
    """The colour of the background in the scheme."""
    return rcParams["figure.facecolor"]


def pale() -> str:
    """A colour that stands out from the background a little: that of the grid."""
    return rcParams["grid.color"]


def color_of(name: str) -> str | None:
    """The colour of something that pictures compare; "ddp-powersgd-4" has that of "powersgd". None: it has none."""
    return next((COLORS[part] for part in (name, *reversed(name.split("-"))) if part in COLORS), None)


def new_figure(panels: int, height: float = 2.9, share_x: bool = False) -> tuple[Figure, list[Any]]:
    """A figure with panels below each other, each `height` inches high."""
    figure = Figure(figsize=(WIDTH, 0.4 + panels * height), layout="constrained")
    return figure, list(figure.subplots(panels, 1, sharex=share_x, squeeze=False)[:, 0])


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
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center")
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


def save_figure(option: str, file: str | os.PathLike, draw: Callable[[], Figure]) -> None:
    """Write a light figure to the file that an option names. Raises UnsupportedError, naming option and file."""
    write_file(option, file, rendered(draw, LIGHT, picture_format(file)))


def rendered(draw: Callable[[], Figure], scheme: dict[str, Any], how: str = "png") -> bytes:
    """The file of a figure, drawn in a scheme."""
    picture = io.BytesIO()
    with rc_context(scheme):
        draw().savefig(picture, dpi=150, format=how)
    return picture.getvalue()


def in_a_picture(text: str) -> str:
    """Escape text that may contain anything, such as a file name, so that matplotlib shows it unchanged."""
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")
