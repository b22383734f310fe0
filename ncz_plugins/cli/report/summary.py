"""Numbers of a run: sums, medians and shares over its steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...core.reasons import Bypass
from .read import Run, Step

# Calls that go plain for these reasons have begun to be compressed, so their time is measured. Other plain calls are
# made at once, and nobody measures their time.
LATE = (Bypass.NON_FINITE.value, Bypass.CODE_OVERFLOW.value, Bypass.NOT_WORTH.value)


@dataclass(frozen=True)
class Times:
    """Times on rank 0: medians over the steps whose length is known.

    The first step after each start is left out, as it also opens connections and allocates memory.

    Attributes:
        steps: number of steps with a known length; if 0, all other attributes are 0.
        step: seconds of a step.
        collectives: seconds in collectives per step, which may overlap with computing.
        share: share of collectives in the time of a step.
        agreeing: share of the time in collectives spent on exchanging a few bytes, for which all ranks must be there.
        measuring: share spent on looking for the largest values.
        encoding: share spent on encoding.
        waiting: share spent on waiting for frames.
        plain: share spent on plain collectives of calls that went plain after measuring.
        inside_nodes: share spent on exchange inside the node.
        rest: remaining share: sending, waiting for decoding, waiting for a CPU core.
        decoding: decoding time as a share of the time in collectives. It overlaps the others if a rank has two cores.
        megabits_per_second: rate at which rank 0 sent while it was in collectives.
        slow_steps: number of steps that took more than twice the median.
        slow_verified: number of slow steps in which the guard verified a call, which is then sent plain as well.
        slow_share: share of slow steps in the total time.
        slowest: number of the slowest step.
        slowest_seconds: seconds of the slowest step.
    """

    steps: int = 0
    step: float = 0.0
    collectives: float = 0.0
    share: float = 0.0
    agreeing: float = 0.0
    measuring: float = 0.0
    encoding: float = 0.0
    waiting: float = 0.0
    plain: float = 0.0
    inside_nodes: float = 0.0
    rest: float = 0.0
    decoding: float = 0.0
    megabits_per_second: float = 0.0
    slow_steps: int = 0
    slow_verified: int = 0
    slow_share: float = 0.0
    slowest: int = 0
    slowest_seconds: float = 0.0

    @property
    def coding(self) -> float:
        """Share of measuring, encoding and decoding in the time in collectives; may exceed 1 if threads overlap."""
        return self.measuring + self.encoding + self.decoding


@dataclass(frozen=True)
class Bypassed:
    """Calls that went plain for one reason: number, and bytes sent."""

    calls: int
    bytes: int


@dataclass(frozen=True)
class Sent:
    """Bytes of all calls of one role: what plain calls would have sent, and what was sent."""

    plain_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Guarded:
    """Findings of the guard. None stands for a number that was not finite.

    Attributes:
        verified: number of verified calls.
        alarms: number of alarms.
        relative_error, error_step, error_name: largest error, its step, and the name of its tensor.
        cosine, cosine_step, cosine_name: lowest cosine, its step, and the name of its tensor.
    """

    verified: int
    alarms: int
    relative_error: float | None
    error_step: int
    error_name: str | None
    cosine: float | None
    cosine_step: int
    cosine_name: str | None


@dataclass(frozen=True)
class Summary:
    """Summary of a run. Bytes are those that rank 0 sent, in all steps together.

    Attributes:
        runs: number of starts of the training.
        steps, first, last: number of steps, and numbers of the first and the last one.
        ratio: plain bytes over bytes sent, of all calls.
        compressed_ratio: the same for compressed calls; None if there were none.
        call_bytes: mean size of a compressed call, in bytes that a plain call would send; 0 if there were none.
        roles: role -> bytes, for calls that named a role.
        sent_whole: reason -> number of gathers of weights that sent everything rather than changes.
        bounds: lowest and highest factor on the bounds, from `steps.bounds` and the guard.
    """

    runs: int
    steps: int
    first: int
    last: int
    calls: int
    compressed_calls: int
    plain_bytes: int
    wire_bytes: int
    local_bytes: int
    ratio: float
    compressed_ratio: float | None
    call_bytes: float
    times: Times
    coders: dict[str, int]
    bypasses: dict[str, Bypassed]
    roles: dict[str, Sent]
    sent_whole: dict[str, int]
    guard: Guarded | None
    bounds: tuple[float, float]

    @property
    def bypassed_bytes(self) -> int:
        return sum(bypassed.bytes for bypassed in self.bypasses.values())

    @property
    def untimed(self) -> float:
        """Share of bytes sent by calls that went plain at once, whose time is not measured."""
        sent = sum(bypassed.bytes for reason, bypassed in self.bypasses.items() if reason not in LATE)
        return sent / self.wire_bytes if self.wire_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON types."""
        return asdict(self)


def summarize(run: Run) -> Summary:
    """Summarize all steps of a run."""
    steps = run.steps
    plain, wire = sum(s.plain_bytes for s in steps), sum(s.wire_bytes for s in steps)
    bypassed_calls, bypassed_bytes = _added(s.bypasses for s in steps), _added(s.bypassed_bytes for s in steps)
    bypasses = {reason: Bypassed(calls, bypassed_bytes.get(reason, 0)) for reason, calls in bypassed_calls.items()}
    bypassed, compressed_calls = sum(bypassed_bytes.values()), sum(s.compressed_calls for s in steps)
    sent = wire - bypassed
    plain_by_role, wire_by_role = (
        _added(s.plain_bytes_by_role for s in steps),
        _added(s.wire_bytes_by_role for s in steps),
    )
    # Each start writes a header. Steps that go back without a header are no start.
    headers = list(run.starts.values())
    restarts = sum(header is not before for before, header in zip(headers, headers[1:]))
    return Summary(
        runs=1 + restarts,
        steps=len(steps),
        first=steps[0].step,
        last=steps[-1].step,
        calls=sum(s.calls for s in steps),
        compressed_calls=compressed_calls,
        plain_bytes=plain,
        wire_bytes=wire,
        local_bytes=sum(s.local_bytes for s in steps),
        ratio=plain / wire if wire else 1.0,
        compressed_ratio=(plain - bypassed) / sent if compressed_calls and sent > 0 else None,
        call_bytes=(plain - bypassed) / compressed_calls if compressed_calls else 0.0,
        times=_times([s for s in steps if s.step_seconds and s.step not in run.starts]),
        coders=_added(s.coders for s in steps),
        bypasses=dict(sorted(bypasses.items(), key=lambda item: -item[1].bytes)),
        roles={role: Sent(nbytes, wire_by_role.get(role, 0)) for role, nbytes in plain_by_role.items()},
        sent_whole=_added(s.sent_whole for s in steps),
        guard=_guarded(steps),
        bounds=(min(s.bound_times for s in steps), max(s.bound_times for s in steps)),
    )


def _times(steps: list[Step]) -> Times:
    """Times over steps whose length is known."""
    if not steps:
        return Times()
    median = statistics.median(s.step_seconds for s in steps)
    slowest = max(steps, key=lambda s: s.step_seconds)
    slow = [s for s in steps if s.step_seconds > 2 * median]
    known = Times(
        steps=len(steps),
        step=median,
        collectives=statistics.median(s.seconds for s in steps),
        share=statistics.median(s.seconds / s.step_seconds for s in steps),
        slow_steps=len(slow),
        slow_verified=sum(bool(s.guard) for s in slow),
        slow_share=sum(s.step_seconds for s in slow) / sum(s.step_seconds for s in steps),
        slowest=slowest.step,
        slowest_seconds=slowest.step_seconds,
    )
    inside = [s for s in steps if s.seconds]
    if not inside:
        return known

    # Shares of what happens in collectives. What no counter covers is the rest.

    def share(seconds: Callable[[Step], float]) -> float:
        """Median share in a step's time in collectives. Differences of measured times count as 0 if negative."""
        return statistics.median(max(0.0, seconds(s)) / s.seconds for s in inside)

    parts = {
        "agreeing": share(_agreeing),
        "measuring": share(lambda s: s.measure_seconds),
        "encoding": share(lambda s: s.encode_seconds),
        "waiting": share(lambda s: s.wait_seconds - _agreeing(s)),
        "plain": share(lambda s: s.plain_seconds),
        "inside_nodes": share(lambda s: s.local_seconds),
    }
    return replace(
        known,
        **parts,
        rest=max(0.0, 1 - sum(parts.values())),
        decoding=share(lambda s: s.decode_seconds),
        megabits_per_second=statistics.median(8e-6 * (s.wire_bytes - _untimed_bytes(s)) / s.seconds for s in inside),
    )


def _agreeing(step: Step) -> float:
    """Seconds of agreeing, without the work that is done meanwhile. Nearly all of it is waiting."""
    return max(0.0, step.agree_seconds - step.measure_seconds - step.local_seconds)


def _untimed_bytes(step: Step) -> int:
    """Bytes sent by calls that went plain at once, whose time is not measured."""
    return sum(nbytes for reason, nbytes in step.bypassed_bytes.items() if reason not in LATE)


def _guarded(steps: list[Step]) -> Guarded | None:
    found = [(finding, step.step) for step in steps for finding in step.guard]
    if not found:
        return None
    # None stands for a number that is not finite, which is worse than any other.
    error, error_step = max(found, key=lambda at: math.inf if at[0].relative_error is None else at[0].relative_error)
    cosine, cosine_step = min(found, key=lambda at: -math.inf if at[0].cosine is None else at[0].cosine)
    return Guarded(
        verified=len(found),
        alarms=sum(finding.alarm for finding, _ in found),
        relative_error=error.relative_error,
        error_step=error_step,
        error_name=error.name,
        cosine=cosine.cosine,
        cosine_step=cosine_step,
        cosine_name=cosine.name,
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sum of mappings from names to numbers."""
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total
