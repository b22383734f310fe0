"""The picture of `ncz report --plot`: ratio, bytes, the guard's errors and times, against the steps."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from ..output import in_a_picture, save_figure
from .read import Run, Step

_FEW = 50  # steps that are shown as points, too


def draw(file: str | os.PathLike, run: Run, title: str) -> None:
    """Write the picture of a run."""
    from matplotlib.figure import Figure

    _, *again = run.starts
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for axes, fill in zip(panels.flat, (_ratio, _bytes, _guard, _times)):
        fill(axes, run)
        axes.grid(alpha=0.3)
        for start in again:
            axes.axvline(start, color="0.6", linestyle=":", zorder=0)
    for axes in panels[1]:
        axes.set_xlabel("step" + (" (dotted: the training was started again)" if again else ""))
    figure.suptitle(in_a_picture(title))
    save_figure("--plot", file, figure)


def _ratio(axes, run: Run) -> None:
    _line(axes, run, "ratio", lambda s: s.ratio, color="black")
    axes.set(title="ratio: plain bytes / bytes sent")
    axes.set_ylim(bottom=0)


def _bytes(axes, run: Run) -> None:
    _line(axes, run, "plain", lambda s: s.plain_bytes / 1e6, color="0.5")
    _line(axes, run, "sent", lambda s: s.wire_bytes / 1e6, color="tab:blue")
    bypassed = "of that, in calls that went plain"
    _line(axes, run, bypassed, lambda s: sum(s.bypassed_bytes.values()) / 1e6, color="tab:orange")
    axes.set(title="MB per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", framealpha=0.6)


def _guard(axes, run: Run) -> None:
    found = [(step.step, finding) for step in run.steps for finding in step.guard]
    axes.set(title="guard: relative error of verified calls")
    if not found:
        axes.text(0.5, 0.5, "nothing was verified", transform=axes.transAxes, ha="center", color="0.5")
        return
    for label, style, alarm in (("verified", "o", False), ("alarm", "rX", True)):
        points = [(at, f.relative_error) for at, f in found if f.alarm == alarm and f.relative_error is not None]
        if points:
            axes.plot(*zip(*points), style, markersize=4, label=label)
    infinite = [at for at, finding in found if finding.relative_error is None]
    if infinite:
        axes.plot(infinite, [1.0] * len(infinite), "r^", transform=axes.get_xaxis_transform(), label="not finite")
    limit = run.header and run.header.config.guard.max_relative_error
    if limit is not None:
        axes.axhline(limit, color="red", linestyle="--", linewidth=1, label="guard.max_relative_error")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", framealpha=0.6)


def _times(axes, run: Run) -> None:
    _line(axes, run, "step", lambda s: s.step_seconds, color="black")
    _line(axes, run, "collectives", lambda s: s.seconds)
    _line(axes, run, "waiting", lambda s: s.wait_seconds)
    _line(axes, run, "encoding", lambda s: s.encode_seconds)
    _line(axes, run, "decoding", lambda s: s.decode_seconds)
    axes.set(title="seconds per step; they overlap", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", framealpha=0.6)


def _line(axes, run: Run, label: str, value: Callable[[Step], float | None], **style) -> None:
    """A line over the steps, with a gap where `value` gives None, or zero on a logarithmic scale."""
    values = [np.nan if (y := value(step)) is None else y for step in run.steps]
    marker = "." if len(values) < _FEW else None
    axes.plot([step.step for step in run.steps], values, label=label, linewidth=1, marker=marker, **style)
