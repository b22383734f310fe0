"""Draws docs/images/way-of-a-call.png: `python docs/images/way_of_a_call.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

STEPS = [
    ("1 decide", "plain or compressed?\nwith which settings?"),
    ("2 compare, agree", "same call everywhere?\nlargest scales count"),
    ("3 exchange", "quantize once, code,\nsend, add integers"),
    ("4 dequantize", "into your tensor:\nsame bits on all ranks"),
    ("5 count", "bytes, times, coders,\nor why it went plain"),
]
WIDTH, HEIGHT, GAP = 2.6, 1.15, 0.4  # of a box, and between two of them
TOP, MIDDLE, BOTTOM = 5.0, 2.85, 0.3  # lower edges of the three rows of boxes
FILL, EDGE, PLAIN_FILL, PLAIN_EDGE = "#e0f2f1", "#00796b", "#f5f5f5", "#757575"
ARROW = {"arrowstyle": "-|>", "color": EDGE, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}


def left_of(column: int) -> float:
    """The left edge of a column of boxes."""
    return column * (WIDTH + GAP)


def box(axes: Axes, x: float, y: float, width: float, title: str, text: str, fill: str, edge: str) -> None:
    """A box with a bold title and some lines of text."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, HEIGHT, boxstyle=style, fc=fill, ec=edge, lw=1.4))
    axes.text(x + width / 2, y + HEIGHT - 0.24, title, ha="center", va="center", fontsize=8.5, weight="bold")
    axes.text(x + width / 2, y + 0.42, text, ha="center", va="center", fontsize=8, linespacing=1.3)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """An arrow from one point to another one."""
    axes.annotate("", xy=end, xytext=start, arrowprops=ARROW | style)


def main() -> None:
    """Draw the picture."""
    figure, axes = pyplot.subplots(figsize=(11, 4.6), dpi=130)
    for y, rank in ((MIDDLE, "rank 0"), (BOTTOM, "rank 1")):
        axes.text(-0.2, y + HEIGHT / 2, rank, ha="right", va="center", fontsize=11, weight="bold")
        for column, (title, text) in enumerate(STEPS):
            box(axes, left_of(column), y, WIDTH, title, text, FILL, EDGE)
            if column:
                arrow(axes, (left_of(column) - GAP, y + HEIGHT / 2), (left_of(column), y + HEIGHT / 2))

    # What ranks tell each other.
    for column, words in ((1, "one short\nmessage"), (2, "frames of\ncoded integers")):
        x = left_of(column) + WIDTH / 2
        arrow(axes, (x, BOTTOM + HEIGHT), (x, MIDDLE), arrowstyle="<|-|>")
        axes.text(x + 0.12, (BOTTOM + HEIGHT + MIDDLE) / 2, words, va="center", fontsize=8, style="italic")

    # The way of a call that goes plain.
    gray = {"color": PLAIN_EDGE, "linestyle": "--"}
    width = left_of(3) + WIDTH - left_of(2)
    words = "compared as well, then sent uncompressed"
    box(axes, left_of(2), TOP, width, "plain collective", words, PLAIN_FILL, PLAIN_EDGE)
    for column, height, words in ((0, 0.8, "small, integers,\nroles not enabled"), (1, 0.35, "NaN, not\nworth it")):
        x, y = left_of(column) + WIDTH / 2, TOP + height
        axes.plot([x, x], [MIDDLE + HEIGHT, y], color=PLAIN_EDGE, linestyle="--", lw=1.4)
        arrow(axes, (x, y), (left_of(2), y), **gray)
        axes.text(x + 0.1, MIDDLE + HEIGHT + 0.45, words, va="center", fontsize=8, style="italic")
    x = left_of(4) + WIDTH / 2
    axes.plot([left_of(2) + width, x], [TOP + HEIGHT / 2] * 2, color=PLAIN_EDGE, linestyle="--", lw=1.4)
    arrow(axes, (x, TOP + HEIGHT / 2), (x, MIDDLE + HEIGHT), **gray)

    axes.set(xlim=(-1.2, left_of(4) + WIDTH + 0.1), ylim=(0.1, TOP + HEIGHT + 0.15))
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("way-of-a-call.png"), bbox_inches="tight")


if __name__ == "__main__":
    main()
