"""The picture of what happens to a sum of three ranks, with numbers that it computes."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from ncz_plugins.cli.picture import BLUE, GRAY, ORANGE, WIDTH, paper

STEP = 0.1  # of the quantizer: twice the bound, as it rounds to the nearest here
GRADIENTS = np.array([[0.31, -0.12], [0.18, 0.41], [-0.09, 0.22]])
FLOATS, INTEGERS, SUMS, RESULTS = 7.6, 5.0, 2.4, -0.2  # lower edges of the rows of boxes
BOX_WIDTH, BOX_HEIGHT, PITCH = 2.5, 0.95, 3.4


def box(axes, rank: int, y: float, text: str, color: str) -> None:
    """A box with numbers in the column of a rank."""
    style = "round,pad=0,rounding_size=0.12"
    patch = FancyBboxPatch((rank * PITCH, y), BOX_WIDTH, BOX_HEIGHT, boxstyle=style, fc=paper(), ec=color, lw=2)
    axes.add_patch(patch)
    axes.text(rank * PITCH + BOX_WIDTH / 2, y + BOX_HEIGHT / 2, text, ha="center", va="center", fontsize=12)


def arrow(axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """An arrow from one point to another one."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def draw() -> Figure:
    """The picture."""
    codes = np.rint(GRADIENTS / STEP).astype(int)
    sums = codes.cumsum(0)
    figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
    axes = figure.subplots()
    ranks = range(len(codes))
    middle = [rank * PITCH + BOX_WIDTH / 2 for rank in ranks]
    for rank in ranks:
        axes.text(middle[rank], FLOATS + BOX_HEIGHT + 0.35, f"rank {rank}", ha="center", fontsize=12)
        box(axes, rank, FLOATS, "{:.2f}   {:.2f}".format(*GRADIENTS[rank]), GRAY)
        box(axes, rank, INTEGERS, "{}   {}".format(*codes[rank]), BLUE)
        box(axes, rank, SUMS, "{}   {}".format(*sums[rank]), BLUE)
        box(axes, rank, RESULTS, "{:.1f}   {:.1f}".format(*STEP * sums[-1]), ORANGE)
        arrow(axes, (middle[rank], FLOATS), (middle[rank], FLOATS - 0.55), GRAY)
        arrow(axes, (middle[rank], FLOATS - 1.1), (middle[rank], INTEGERS + BOX_HEIGHT), BLUE)
        arrow(axes, (middle[rank], INTEGERS), (middle[rank], SUMS + BOX_HEIGHT), BLUE)
        arrow(axes, (middle[rank], RESULTS + 1.5), (middle[rank], RESULTS + BOX_HEIGHT), ORANGE)
        if rank:
            y = SUMS + BOX_HEIGHT / 2
            arrow(axes, (middle[rank - 1] + BOX_WIDTH / 2, y), (middle[rank] - BOX_WIDTH / 2, y), BLUE)
    # The last rank has the sum. It goes back to all, coded once more.
    axes.plot([middle[0], middle[-1]], [RESULTS + 1.5] * 2, color=ORANGE, lw=2)
    axes.plot([middle[-1]] * 2, [SUMS, RESULTS + 1.5], color=ORANGE, lw=2)
    for y, bold, rest in (
        (FLOATS - 0.83, "quantize once", f"to integers, in steps of {STEP:g}: the only loss"),
        (INTEGERS - 0.8, "add integers", "that each hop decodes and codes: no loss"),
        (RESULTS + 2.05, "dequantize", "the same integers: same bits on all ranks"),
    ):
        axes.text(-0.1, y, bold, fontsize=12, weight="bold", va="center", backgroundcolor=paper())
        axes.text(3.2, y, rest, fontsize=11, va="center", backgroundcolor=paper())
    axes.set(xlim=(-0.2, 2 * PITCH + BOX_WIDTH + 0.2), ylim=(RESULTS - 0.15, FLOATS + BOX_HEIGHT + 0.8))
    axes.axis("off")
    return figure
