"""How a finished run compares with what `ncz plan` said."""

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

_CLOSE = 0.1  # of the planned figure: a smaller difference is not named

Seconds = Annotated[float, Field(ge=0)]


class PlanPart(BaseModel):
    """What is read of a plan. Further keys are welcome: other versions know more."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class PlannedInterval(PlanPart):
    """Seconds, and what they lie between."""

    low: Seconds
    middle: Seconds
    high: Seconds


class PlannedStep(PlanPart):
    """See `cli.plan.step.Step`."""

    kind: str
    seconds: PlannedInterval
    compute: Seconds
    communication: Seconds
    wire_bytes: Seconds
    compressed_calls: Seconds


class PlannedPlace(PlanPart):
    """A plan for one place."""

    ranks: int
    steps: Annotated[list[PlannedStep], Field(min_length=1)]


class PlanFile(PlanPart):
    """The file."""

    plans: Annotated[list[PlannedPlace], Field(min_length=1)]


@dataclass(frozen=True)
class Figure:
    """One figure of a step: what was planned, with its ends if it has some, and what was measured."""

    planned: float
    measured: float
    low: float | None = None
    high: float | None = None

    @property
    def times(self) -> float:
        """Measured over planned."""
        return self.measured / self.planned if self.planned else float("inf") if self.measured else 1.0


@dataclass(frozen=True)
class Comparison:
    """A run beside a plan.

    Attributes:
        figures: by name.
        words: what differs most.
    """

    figures: dict[str, Figure]
    words: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return asdict(self)


def read_plan(path: str | os.PathLike) -> PlannedPlace:
    """The plan in a file that `ncz plan --json` wrote. Raises ConfigError, naming the file."""
    path = os.fspath(path)
    try:
        found = PlanFile.model_validate(read_document(path))
    except ValidationError as error:
        raise ConfigError(f"--plan {path}: {first_problem(error)}; `ncz plan --json` writes such files") from None
    if len(found.plans) > 1:
        raise ConfigError(
            f"--plan {path}: holds {len(found.plans)} plans to compare: make one for the machines you used"
        )
    return found.plans[0]


def compare(plan: PlannedPlace, summary: Summary, header: Header | None) -> Comparison:
    """A run beside the plan's compressed step, or its plain one where the run compressed nothing.

    Raises ConfigError where the run had another number of ranks, or the length of its steps is not known.
    """
    ranks = header.ranks if header else None
    if ranks is not None and ranks != plan.ranks:
        raise ConfigError(f"--plan: is for {plan.ranks} ranks, and the run had {ranks}: plan with its number")
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
        words += ", with the bytes as planned: the link or the cores were not what the plan took them for"
    return words
