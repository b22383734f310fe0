"""Picture of `ncz report --plot`: ratio, bytes, errors found by the guard, and times, for each step."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from ..picture import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    RED,
    finish,
    from_zero,
    in_a_picture,
    in_bytes,
    in_seconds,
    ink,
    logarithmic,
    new_figure,
    save_figure,
    whole_numbers,
)
from .read import Run, Step

_MAX_STEPS_WITH_POINTS = 50  # with fewer steps, each is also drawn as a point


def draw(file: str | os.PathLike, run: Run, title: str) -> None:
    """Write the picture of a run."""
    save_figure("--plot", file, partial(_figure, run, title))


def _figure(run: Run, title: str) -> Figure:
    _, *again = run.starts
    fills = [_ratio, _bytes, _guard, _times] if any(step.guard for step in run.steps) else [_ratio, _bytes, _times]
    figure, panels = new_figure(len(fills), share_x=True)
    for axes, fill in zip(panels, fills):
        fill(axes, run)
        for start in again:
            axes.axvline(start, color=GRAY, linestyle=":", linewidth=0.8, zorder=0)
    whole_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel("step" + (" (dotted: the training was started again)" if again else ""))
    figure.suptitle(in_a_picture(title))
    return figure


def _ratio(axes, run: Run) -> None:
    _line(axes, run, None, lambda s: s.ratio, ink())
    from_zero(axes)
    finish(axes, "ratio: plain bytes / bytes sent")


def _bytes(axes, run: Run) -> None:
    _line(axes, run, "plain", lambda s: s.plain_bytes, GRAY, linewidth=3)
    _line(axes, run, "sent", lambda s: s.wire_bytes, BLUE)
    _line(axes, run, "of that, in plain calls", lambda s: sum(s.bypassed_bytes.values()), ORANGE, linestyle="--")
    from_zero(axes)
    in_bytes(axes.yaxis)
    finish(axes, "bytes per step", empty="nothing was sent")


def _guard(axes, run: Run) -> None:
    found = [(step.step, finding) for step in run.steps for finding in step.guard]
    for label, style, color, alarm in (("verified", "o", BLUE, False), ("alarm", "X", RED, True)):
        points = [(at, f.relative_error) for at, f in found if f.alarm == alarm and f.relative_error is not None]
        if points:
            axes.plot(*zip(*points), style, color=color, markersize=5, label=label)
    limit = run.header and run.header.config.guard.max_relative_error
    if limit is not None:
        axes.axhline(limit, color=RED, linestyle="--", linewidth=1, label="guard.max_relative_error")
        axes.update_datalim([(found[0][0], limit)])
    infinite = [at for at, finding in found if finding.relative_error is None]
    from_zero(axes)
    if infinite:  # within the room above the highest curve
        high = [0.95] * len(infinite)
        axes.plot(infinite, high, "^", color=RED, transform=axes.get_xaxis_transform(), label="not finite")
    finish(axes, "guard: relative error of verified calls", columns=2)


def _times(axes, run: Run) -> None:
    _line(axes, run, "step", lambda s: s.step_seconds, ink())
    _line(axes, run, "collectives", lambda s: s.seconds, BLUE)
    _line(axes, run, "waiting", lambda s: s.wait_seconds, ORANGE)
    _line(axes, run, "encoding", lambda s: s.encode_seconds, GREEN)
    _line(axes, run, "decoding", lambda s: s.decode_seconds, RED)
    logarithmic(axes.yaxis)
    in_seconds(axes.yaxis)
    finish(axes, "time per step; they overlap", empty="no time is known")


def _line(
    axes,
    run: Run,
    label: str | None,
    value: Callable[[Step], float | None],
    color: str,
    linewidth: float = 1.2,
    **style,
) -> None:
    """Draw `value` of each step, with a gap for None. Nothing is drawn if all values are None or 0."""
    values = [np.nan if (y := value(step)) is None else y for step in run.steps]
    if np.nansum(values):
        marker = "." if len(values) < _MAX_STEPS_WITH_POINTS else None
        steps = [step.step for step in run.steps]
        axes.plot(steps, values, label=label, color=color, linewidth=linewidth, marker=marker, **style)
