"""Comparison of a finished run with what `ncz plan` predicted."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.config import first_problem, read_document
from ...core.errors import ConfigError
from ..output import duration, size
from .read import Header
from .summary import Summary

_CLOSE = 0.1  # a difference below this share of the planned number is not mentioned

Seconds = Annotated[float, Field(ge=0)]


class PlanPart(BaseModel):
    """Part of a plan. Unknown keys are ignored: other versions may write more."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class PlannedInterval(PlanPart):
    """Predicted seconds with lower and upper end."""

    low: Seconds
    middle: Seconds
    high: Seconds


class PlannedStep(PlanPart):
    """One predicted step; for the attributes see `cli.plan.step.Step`."""

    kind: str
    seconds: PlannedInterval
    compute: Seconds
    communication: Seconds
    wire_bytes: Seconds
    compressed_calls: Seconds


class PlannedPlace(PlanPart):
    """Plan for one kind of machines."""

    ranks: int
    steps: Annotated[list[PlannedStep], Field(min_length=1)]


class PlanFile(PlanPart):
    """Contents of a file written by `ncz plan --json`."""

    plans: Annotated[list[PlannedPlace], Field(min_length=1)]


@dataclass(frozen=True)
class Figure:
    """One number of a step: planned value, lower and upper end if the plan has them, and measured value."""

    planned: float
    measured: float
    low: float | None = None
    high: float | None = None

    @property
    def times(self) -> float:
        """Measured value over planned value."""
        return self.measured / self.planned if self.planned else float("inf") if self.measured else 1.0


@dataclass(frozen=True)
class Comparison:
    """Comparison of a run with a plan.

    Attributes:
        figures: name -> number of a step.
        words: what differs most, in a sentence.
    """

    figures: dict[str, Figure]
    words: str

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return asdict(self)


def read_plan(path: str | os.PathLike) -> PlannedPlace:
    """Read the plan in a file written by `ncz plan --json`. Raises ConfigError, naming the file."""
    path = os.fspath(path)
    try:
        found = PlanFile.model_validate(read_document(path))
    except ValidationError as error:
        raise ConfigError(f"--plan {path}: {first_problem(error)}; `ncz plan --json` writes such files") from None
    if len(found.plans) > 1:
        raise ConfigError(
            f"--plan {path}: holds {len(found.plans)} plans to compare: make a plan for the machines you used only"
        )
    return found.plans[0]


def compare(plan: PlannedPlace, summary: Summary, header: Header | None) -> Comparison:
    """Compare a run with the compressed step of a plan, or with its plain step if the run compressed nothing.

    Raises ConfigError if the run had another number of ranks, or no step whose length is known.
    """
    ranks = header.ranks if header else None
    if ranks is not None and ranks != plan.ranks:
        raise ConfigError(f"--plan: is for {plan.ranks} ranks, and the run had {ranks}: make a plan for {ranks} ranks")
    if not summary.times.steps:
        raise ConfigError("--plan: the run has no step whose length is known: it needs 2 steps or more")
    kind = "compressed" if summary.compressed_calls else "plain"
    planned = next((each for each in plan.steps if each.kind == kind), plan.steps[0])
    times = summary.times
    figures = {
        "step": Figure(planned.seconds.middle, times.step, planned.seconds.low, planned.seconds.high),
        "collectives": Figure(planned.communication, times.collectives),
        "the rest": Figure(
            max(0.0, planned.seconds.middle - planned.communication), max(0.0, times.step - times.collectives)
        ),
        "sent": Figure(planned.wire_bytes, summary.wire_bytes / summary.steps),
    }
    return Comparison(figures, _words(figures, kind))


def _words(figures: dict[str, Figure], kind: str) -> str:
    step = figures["step"]
    inside = "inside" if step.low <= step.measured <= step.high else "outside of"
    words = f"a {kind} step took {step.times:.2f} times what was planned, {inside} what the plan allows"
    if abs(step.times - 1) <= _CLOSE:
        return words
    parts = {name: figures[name].measured - figures[name].planned for name in ("collectives", "the rest")}
    name = max(parts, key=lambda each: abs(parts[each]))
    more = "more" if parts[name] > 0 else "less"
    words += f"; most of the difference is in {name}: {duration(abs(parts[name]))} {more}"
    sent = figures["sent"]
    if name == "collectives" and abs(sent.times - 1) > _CLOSE:
        more = "more" if sent.times > 1 else "less"
        words += f", with {size(abs(sent.measured - sent.planned))} {more} sent"
    elif name == "collectives":
        words += ", with the bytes as planned: the link or the cores were slower or faster than the plan assumed"
    return words
