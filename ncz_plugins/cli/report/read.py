"""Reader of a file of records. Its run may have been stopped, resumed or killed, and another run may share the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.config import first_problem, shorten
from ...core.errors import ConfigError

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = Annotated[int, Field(ge=1, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0)]

_MAX_NAMED = 5  # settings, lines or notes of one kind that are listed; the rest is counted
_MAX_CHARACTERS = 40  # of the value of a setting in a note


class Line(BaseModel):
    """Line of the file. Unknown keys are ignored: other versions may write more."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Thresholds(Line, extra="allow"):
    """Thresholds of the guard."""

    max_relative_error: float | None = None


class Settings(Line, extra="allow"):
    """Settings of a configuration that matter to the report."""

    quantizer: dict[str, Any] = {}
    guard: Thresholds = Thresholds()


class Header(Line):
    """Header: what the following steps have in common."""

    ncz_plugins: str
    run: str | None = None
    config: Settings = Settings()
    ranks: Number | None = None
    link_gbps: float | None = None


class GuardFinding(Line):
    """Finding of the guard in one call. None stands for a number that was not finite."""

    name: str | None = None
    relative_error: float | None = None
    cosine: float | None = None
    alarm: bool = False


class Step(Line):
    """Record of one step on rank 0. `core.runtime.statistics.Counters` explains most attributes."""

    step: Number
    run: str | None = None
    step_seconds: Seconds | None = None
    calls: Count
    compressed_calls: Count
    plain_bytes: Count
    wire_bytes: Count
    local_bytes: Count = 0
    copied_bytes: Count = 0
    bypasses: dict[str, Count] = {}
    bypassed_bytes: dict[str, Count] = {}
    plain_bytes_by_role: dict[str, Count] = {}
    wire_bytes_by_role: dict[str, Count] = {}
    sent_whole: dict[str, Count] = {}
    replayed_calls: Count = 0
    not_replayed: dict[str, Count] = {}
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
        """Plain bytes over bytes sent; 1.0 if nothing was sent."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else 1.0


@dataclass(frozen=True)
class Run:
    """Records of one training, from its first step to its last.

    Attributes:
        starts: first step after a start -> header of that start; None if it has no header.
        steps: in ascending order, each step number once.
        notes: remarks about the file, for the reader of the report.
        training: number of this training among those in the file, from 1.
        trainings: number of trainings that wrote the file at the same time.
    """

    starts: dict[int, Header | None]
    steps: list[Step]
    notes: list[str]
    training: int = 1
    trainings: int = 1

    @property
    def header(self) -> Header | None:
        """Header of the last start."""
        return self.starts[max(self.starts)]

    def between(self, first: int | None, last: int | None) -> Run:
        """A copy with steps `first` to `last`, both included; None: no limit. Raises ConfigError if none is left."""
        steps = [s for s in self.steps if (first is None or s.step >= first) and (last is None or s.step <= last)]
        if not steps:
            wanted = f"from {first or 1} to {last or 'the end'}"
            raise ConfigError(
                f"there are no steps {wanted}; the file has {self.steps[0].step} to {self.steps[-1].step}"
            )
        earlier = max(start for start in self.starts if start <= steps[0].step)
        starts = {start: header for start, header in self.starts.items() if earlier <= start <= steps[-1].step}
        return replace(self, starts=starts, steps=steps, notes=[*self.notes, *_changes(starts)])


def _changes(starts: dict[int, Header | None]) -> list[str]:
    """A note for each start whose settings differ from those of the previous start."""
    headers = list(starts.items())
    return _last_of_many(
        [
            f"settings changed at step {start} ({differences}); the verdict goes by the last ones"
            for (_, before), (start, header) in zip(headers, headers[1:])
            if (differences := _differences(before, header))
        ]
    )


def _differences(before: Header | None, after: Header | None, which: str = "now") -> str:
    """Settings that differ, with both values; empty if none differs, or one of the headers is missing.

    Args:
        which: word before the values of `after`.
    """
    if before is None or after is None or before is after:
        return ""
    old, new = _settings(before), _settings(after)
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    words = [f"{name} {_value(old, name)}, {which} {_value(new, name)}" for name in names[:_MAX_NAMED]]
    return "; ".join(words) + (f"; and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")


def _settings(header: Header) -> dict[str, Any]:
    """Number of ranks and settings of a start, by dotted key."""
    found: dict[str, Any] = {"ranks": header.ranks}
    left = list(header.config.model_dump(exclude_unset=True).items())
    while left:
        name, value = left.pop(0)
        if isinstance(value, Mapping):
            left[:0] = [(f"{name}.{key}", each) for key, each in value.items()]
        else:
            found[name] = value
    return found


def _value(settings: dict[str, Any], name: str) -> str:
    return json.dumps(settings[name])[:_MAX_CHARACTERS] if name in settings else "not named"


# ------------------------------------------------------------------ a file


Entry = tuple[int, Header | Step]  # number of a line, and its contents


def read(path: str | os.PathLike, training: int | None = None) -> Run:
    """Read the records of one training from a file of JSON lines.

    - A resumed run continues in the same file, with a header of its own. From its first step on, its steps replace
      those of the run before it.
    - Runs that wrote at the same time are different trainings.
    - An incomplete line, left by a killed run, is skipped and noted if it is the last line or a header follows.
    - Blank lines and zero bytes, left by a file system after a crash, are skipped and noted.

    Args:
        path: path of the file.
        training: number of the training, from 1, if there are several; None: the one that was started last.

    Raises ConfigError, naming the file and the line, for any other line that is not a record, and for a training that
    does not exist.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            texts = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    notes: list[str] = []
    trainings, latest = _trainings(list(_entries(path, texts, notes)))
    if not trainings:
        raise ConfigError(f"{path}: holds no step; statistics.jsonl of a training's configuration names such a file")
    count = len(trainings)
    chosen = latest if training is None else training
    if not 1 <= chosen <= count:
        raise ConfigError(f"--training {chosen}: is not in {path}; allowed: 1" + (f" to {count}" if count > 1 else ""))
    if count > 1:
        others = (_beside(trainings[chosen - 1], each, at) for at, each in enumerate(trainings, 1) if at != chosen)
        notes.append(
            f"{count} trainings wrote this file at the same time; this is number {chosen}, and --training chooses "
            f"another: {'; '.join(others)}"
        )
    starts, steps = _joined(trainings[chosen - 1], notes)
    return Run(starts, steps, notes, chosen, count)


def _trainings(entries: list[Entry]) -> tuple[list[list[Entry]], int]:
    """Entries of each training, and the number, from 1, of the training that was started last.

    All records of a start have the same `run`. A start whose records come after all records of an earlier start
    continues its training. Starts whose records are interleaved belong to different trainings.
    """
    by_start: dict[str | None, list[Entry]] = {}
    for entry in entries:
        by_start.setdefault(entry[1].run, []).append(entry)
    trainings: list[list[Entry]] = []
    latest = 0
    for found in by_start.values():
        if not any(isinstance(line, Step) for _, line in found):
            continue
        ended = [at for at, each in enumerate(trainings) if each[-1][0] < found[0][0]]
        if ended:  # prefer a training with the same settings, then the one that wrote last
            latest = max(ended, key=lambda at: (_begins_like(trainings[at], found), trainings[at][-1][0]))
            trainings[latest] += found
        else:
            latest = len(trainings)
            trainings.append(found)
    return trainings, latest + 1


def _header(entries: list[Entry]) -> Header | None:
    """Header of the first start; None if it has none."""
    return entries[0][1] if isinstance(entries[0][1], Header) else None


def _begins_like(one: list[Entry], other: list[Entry]) -> bool:
    """Whether both begin with a header, and the settings are the same."""
    first, second = _header(one), _header(other)
    return first is not None and second is not None and first.config == second.config


def _beside(shown: list[Entry], other: list[Entry], number: int) -> str:
    """Words that tell another training of the file from the one shown."""
    steps = [line.step for _, line in other if isinstance(line, Step)]
    differences = _differences(_header(other), _header(shown), "here")
    return f"number {number} has steps {min(steps)} to {max(steps)}" + (f" ({differences})" if differences else "")


def _joined(entries: list[Entry], notes: list[str]) -> tuple[dict[int, Header | None], list[Step]]:
    """Starts and steps of one training that count. Adds notes on those that don't count."""
    steps: list[Step] = []
    starts: list[tuple[int, Header | None]] = []
    # `header` is the last one read; `begins` says that the next step is the first one after it.
    header, begins = None, True
    again, backward = [], 0
    for number, line in entries:
        if isinstance(line, Header):
            header, begins = line, True
            continue
        # A start, or a step that goes back: later steps of earlier runs don't count.
        if begins or line.step <= steps[-1].step:
            backward += not begins
            before, last = (starts[-1][1] if starts else None), (steps[-1].step if steps else 0)
            first = _drop_from(line.step, steps, starts)
            if first is not None:
                is_gone = not starts or starts[-1][1] is not before  # if not, `_changes` compares the settings
                changed = _differences(before, header) if is_gone else ""
                changed = changed and f" with other settings ({changed})"
                again.append(f"{_several(first, last)} made again{changed} from line {number} on: the later run counts")
            starts.append((line.step, header))
        steps.append(line)
        begins = False
    notes += _last_of_many(again)
    if backward > _MAX_NAMED:
        notes.append(
            f"steps go back {backward:,} times without a header: if several trainings wrote this file at the same "
            "time, these figures are a mixture of theirs; give each training a file of its own"
        )
    return dict(starts), steps


def _drop_from(step: int, steps: list[Step], starts: list[tuple[int, Header | None]]) -> int | None:
    """Drop steps and starts from this step on. Returns the first dropped step; None if there is none."""
    first = None
    while steps and steps[-1].step >= step:
        first = steps.pop().step
    while starts and starts[-1][0] >= step:
        starts.pop()
    return first


# ------------------------------------------------------------------ lines


def _entries(path: str, texts: list[bytes], notes: list[str]) -> Iterator[Entry]:
    """Number and contents of each line. Skips and notes what a crash leaves; raises ConfigError for anything else."""
    empty: list[int] = []
    torn: list[int] = []
    documents: list[tuple[int, dict[str, Any] | None, bytes]] = []
    for number, text in enumerate(texts, 1):
        pieces = [piece for piece in re.split(rb"\0+", text) if piece.strip()]
        found = [_parse(piece) for piece in pieces]
        if b"\0" in text or not pieces:
            empty.append(number)
            found = [each for each in found if each is not None]  # None: cut by the zero bytes
        documents += [(number, each, text) for each in found]
    # A line may be incomplete if no complete line follows, or the next complete one is a header.
    follows = True
    may_be_torn = []
    for _, document, _ in reversed(documents):
        may_be_torn.append(follows)
        follows = follows if document is None else _is_header(document)
    may_be_torn.reverse()
    for (number, document, text), excused in zip(documents, may_be_torn):
        if document is not None:
            yield number, _checked(Header if _is_header(document) else Step, document, path, number)
        elif excused:
            torn.append(number)
        else:
            raise ConfigError(f"{path}:{number}: is not a JSON object: {shorten(text.decode('utf-8', 'replace'))}")
    if empty:
        notes.append(f"{_lines(empty)} blank or cut by zero bytes, as after a crash: left out")
    if torn:
        notes.append(f"{_lines(torn)} torn, as a run was killed: left out")


def _parse(text: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None if there is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
        return None
    return document if isinstance(document, dict) else None


def _is_header(document: dict[str, Any] | None) -> bool:
    return document is not None and "ncz_plugins" in document


def _checked(line_type: type[Line], document: dict[str, Any], path: str, number: int) -> Any:
    try:
        return line_type(**document)
    except ValidationError as error:
        raise ConfigError(
            f"{path}:{number}: {first_problem(error)}; is this a file that statistics.jsonl named?"
        ) from None
    except TypeError as error:  # a key that is not a valid name
        raise ConfigError(f"{path}:{number}: {error}") from None


def _several(first: int, last: int) -> str:
    return f"step {first} was" if first == last else f"steps {first} to {last} were"


def _last_of_many(notes: list[str]) -> list[str]:
    """Notes of one kind; of many, the last ones and how many are left out."""
    left_out = len(notes) - _MAX_NAMED
    return notes if left_out <= 0 else [f"{left_out:,} notes like the next one are left out", *notes[left_out:]]


def _lines(numbers: Sequence[int]) -> str:
    """ "line 3 is", or "7 lines (1, 2, 3, 4, 5 and 2 more) are"."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED:,} more" if len(numbers) > _MAX_NAMED else ""
    return f"{len(numbers):,} lines ({named}{more}) are"
