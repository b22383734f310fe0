"""Reading the JSON lines of a run, which may have been stopped, resumed and killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.config import first_problem, shorten
from ...core.errors import ConfigError

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = Annotated[int, Field(ge=1, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0)]


class Line(BaseModel):
    """What a line must hold for us. Further keys are welcome: other versions know more."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Thresholds(Line, extra="allow"):
    """Those of the guard."""

    max_relative_error: float | None = None
    min_cosine: float | None = None


class Settings(Line, extra="allow"):
    """What matters here of a configuration."""

    quantizer: dict[str, Any] = {}
    guard: Thresholds = Thresholds()


class Header(Line):
    """What the steps that follow have in common."""

    ncz_plugins: str
    config: Settings = Settings()
    ranks: Number | None = None
    link_gbps: float | None = None


class GuardFinding(Line):
    """What the guard found in one call; None stands for a figure that was not finite."""

    name: str | None = None
    relative_error: float | None = None
    cosine: float | None = None
    alarm: bool = False


class Step(Line):
    """One step, as rank 0 saw it: see `core.runtime.statistics.Counters` for most of these."""

    step: Number
    step_seconds: Seconds | None = None
    calls: Count
    compressed_calls: Count
    plain_bytes: Count
    wire_bytes: Count
    local_bytes: Count = 0
    bypasses: dict[str, Count] = {}
    bypassed_bytes: dict[str, Count] = {}
    plain_bytes_by_role: dict[str, Count] = {}
    wire_bytes_by_role: dict[str, Count] = {}
    sent_whole: dict[str, Count] = {}
    agree_seconds: Seconds = 0.0
    measure_seconds: Seconds = 0.0
    local_seconds: Seconds = 0.0
    encode_seconds: Seconds = 0.0
    decode_seconds: Seconds = 0.0
    wait_seconds: Seconds = 0.0
    plain_seconds: Seconds = 0.0
    seconds: Seconds
    coders: dict[str, Count] = {}
    bound_times: float = 1.0
    guard: list[GuardFinding] = Field(default_factory=list)

    @property
    def ratio(self) -> float:
        """1.0 where nothing was sent."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else 1.0


@dataclass(frozen=True)
class Run:
    """A training, from its first step to its last.

    Attributes:
        starts: the header in force from a step on, by that step, which is the first after the header; None if the file
            has none there.
        steps: by ascending number, each number once.
        notes: what people should know about the file.
    """

    starts: dict[int, Header | None]
    steps: list[Step]
    notes: list[str]

    @property
    def header(self) -> Header | None:
        """Of the latest start."""
        return self.starts[max(self.starts)]

    def between(self, first: int | None, last: int | None) -> Run:
        """The same with these steps only, both ends included; None is no limit."""
        steps = [s for s in self.steps if (first is None or s.step >= first) and (last is None or s.step <= last)]
        if not steps:
            wanted = f"from {first or 1} to {last or 'the end'}"
            raise ConfigError(
                f"there are no steps {wanted}; the file has {self.steps[0].step} to {self.steps[-1].step}"
            )
        earlier = max(start for start in self.starts if start <= steps[0].step)
        starts = {start: header for start, header in self.starts.items() if earlier <= start <= steps[-1].step}
        return Run(starts, steps, [*self.notes, *_changes(starts)])


def _changes(starts: dict[int, Header | None]) -> list[str]:
    """A note for each start with other settings than the one before it."""
    headers = list(starts.items())
    return [
        f"settings changed at step {start}; the verdict goes by the last ones"
        for (_, before), (start, header) in zip(headers, headers[1:])
        if header and before and header.config != before.config
    ]


def read(path: str | os.PathLike) -> Run:
    """The run that a file of JSON lines tells of.

    A run that was resumed goes on in the same file after a header of its own; steps of the run before it that it makes
    again, or that come after its first one, do not count. A line that is torn, as whoever wrote it was killed, is left
    out and noted, if it is the last one or a header follows.

    Raises ConfigError, naming the file and the line, for anything else that is no record of a run.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            texts = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    notes: list[str] = []
    header, begins, latest = None, True, 0
    starts: dict[int, Header | None] = {}
    steps: dict[int, Step] = {}
    for number, line in _lines(path, texts, notes):
        if isinstance(line, Header):
            header, begins = line, True
            continue
        if begins or line.step <= latest:
            again = [known for known in steps if known >= line.step]
            if again:
                notes.append(f"{_several(again)} made again from line {number} on: the later run counts")
            steps = {known: step for known, step in steps.items() if known < line.step}
            starts = {start: known for start, known in starts.items() if start < line.step} | {line.step: header}
        steps[line.step] = line
        begins, latest = False, line.step
    if not steps:
        raise ConfigError(f"{path}: holds no step; statistics.jsonl of a training's configuration names such a file")
    return Run(starts, [steps[number] for number in sorted(steps)], notes)


def _lines(path: str, texts: list[bytes], notes: list[str]) -> Iterator[tuple[int, Header | Step]]:
    """What stands on each line, by its number. Torn ones are left out and noted, for others there is no excuse."""
    documents = [_parse(text) for text in texts]
    may_be_torn, follows = [], True  # whether the next line that is whole is a header, or there is none
    for document in reversed(documents):
        may_be_torn.append(follows)
        follows = follows if document is None else _is_header(document)
    may_be_torn.reverse()
    for number, document in enumerate(documents, 1):
        if document is None:
            if not may_be_torn[number - 1]:
                text = texts[number - 1].decode("utf-8", "replace")
                raise ConfigError(f"{path}:{number}: is not a JSON object: {shorten(text)}")
            notes.append(f"line {number} is torn, as its run was killed; it is left out")
        else:
            yield number, _checked(Header if _is_header(document) else Step, document, path, number)


def _parse(text: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, or None."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # also brackets that are nested too deeply
        return None
    return document if isinstance(document, dict) else None


def _is_header(document: dict[str, Any] | None) -> bool:
    return document is not None and "ncz_plugins" in document


def _checked(kind: type[Line], document: dict[str, Any], path: str, number: int) -> Any:
    try:
        return kind(**document)
    except ValidationError as error:
        raise ConfigError(
            f"{path}:{number}: {first_problem(error)}; is this a file that statistics.jsonl named?"
        ) from None
    except TypeError as error:  # keys that are no names
        raise ConfigError(f"{path}:{number}: {error}") from None


def _several(steps: list[int]) -> str:
    return f"step {steps[0]} was" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)} were"
