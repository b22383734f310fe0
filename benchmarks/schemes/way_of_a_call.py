"""The picture of the way of a call, on every rank."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from ncz_plugins.cli.picture import BLUE, GRAY, WIDTH, paper

STEPS = [
    ("1 decide", "plain or compressed?\nwith which settings?"),
    ("2 compare, agree", "same everywhere?\nlargest scales count"),
    ("3 exchange", "quantize once, code,\nsend, add integers"),
    ("4 dequantize", "into your tensor: the\nsame bits on all ranks"),
    ("5 count", "bytes, times, coders,\nor why it went plain"),
]
BOX_WIDTH, BOX_HEIGHT, GAP = 2.75, 1.15, 0.5  # of a box, and between two of them in a column
COLUMNS = 0, 4.1  # left edges of the boxes of rank 0 and of rank 1
PLAIN = 7.9  # left edge of the plain collective
SMALL = {"fontsize": 10, "linespacing": 1.3, "va": "center", "ha": "center"}


def bottom(step: int) -> float:
    """The lower edge of the boxes of a step."""
    return (len(STEPS) - 1 - step) * (BOX_HEIGHT + GAP)


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
    """A box with a bold title and some lines of text."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=paper(), ec=color, lw=2))
    axes.text(x + width / 2, y + height - 0.24, title, ha="center", va="center", fontsize=10, weight="bold")
    axes.text(x + width / 2, y + (height - 0.4) / 2, text, **SMALL)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, **style: object) -> None:
    """An arrow from one point to another one."""
    shape = {"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkA": 0, "shrinkB": 0} | style
    axes.annotate("", xy=end, xytext=start, arrowprops=shape)


def draw() -> Figure:
    """The picture."""
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    axes = figure.subplots()
    for rank, x in enumerate(COLUMNS):
        axes.text(x + BOX_WIDTH / 2, bottom(0) + BOX_HEIGHT + 0.3, f"rank {rank}", ha="center", fontsize=11)
        for step, (title, text) in enumerate(STEPS):
            box(axes, x, bottom(step), BOX_WIDTH, BOX_HEIGHT, title, text, BLUE)
            if step:
                top = bottom(step) + BOX_HEIGHT
                arrow(axes, (x + BOX_WIDTH / 2, top + GAP), (x + BOX_WIDTH / 2, top), BLUE)

    # What ranks tell each other.
    left, right = COLUMNS[0] + BOX_WIDTH, COLUMNS[1]
    for step, words in ((1, "one short\nmessage"), (2, "frames of\ncodes")):
        y = bottom(step) + 0.3
        arrow(axes, (left, y), (right, y), BLUE, arrowstyle="<|-|>")
        axes.text((left + right) / 2, y + 0.42, words, **SMALL)

    # The way of a call that goes plain: after the first or the second step, on to the last one.
    width, low, high = 2.1, bottom(3), bottom(1) - GAP
    text = "compared\nas well, then\nsent\nuncompressed"
    box(axes, PLAIN, low, width, high - low, "plain", text, GRAY)
    edge, middle = COLUMNS[1] + BOX_WIDTH, PLAIN + width / 2
    dashed = {"color": GRAY, "linestyle": "--", "lw": 1.6}
    y = bottom(0) + BOX_HEIGHT / 2
    axes.plot([edge, middle], [y, y], **dashed)
    arrow(axes, (middle, y), (middle, high), GRAY, linestyle="--")
    axes.text(middle, y + 0.5, "small, integers,\nroles not enabled", **SMALL)
    y = bottom(1) + BOX_HEIGHT / 2
    axes.plot([edge, PLAIN + 0.25], [y, y], **dashed)
    arrow(axes, (PLAIN + 0.25, y), (PLAIN + 0.25, high), GRAY, linestyle="--")
    axes.text((edge + PLAIN) / 2, y + 0.45, "NaN, not\nworth it", **SMALL)
    y = bottom(4) + BOX_HEIGHT / 2
    axes.plot([middle, middle], [low, y], **dashed)
    arrow(axes, (middle, y), (edge, y), GRAY, linestyle="--")

    axes.set(xlim=(-0.1, PLAIN + width + 0.3), ylim=(-0.1, bottom(0) + BOX_HEIGHT + 0.75))
    axes.axis("off")
    return figure
