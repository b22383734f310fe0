"""What is trained, and how long a step computes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import ConfigError
from ..report.read import read
from ..report.summary import summarize

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
EFFICIENCY = (0.3, 0.4, 0.5)  # of a GPU's peak that a training reaches: a guess where nobody says it
_FLOPS_PER_PARAMETER = 6  # for each token: 2 in the forward pass, 4 in the backward pass (Kaplan et al., 2020)


class Interval(NamedTuple):
    """A figure, and what it lies between."""

    low: float
    middle: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        return cls(value, value, value)

    def times(self, other: Interval) -> Interval:
        """The product of two that are positive."""
        return Interval(self.low * other.low, self.middle * other.middle, self.high * other.high)


@dataclass(frozen=True)
class Workload:
    """One training.

    Attributes:
        name: for people.
        parameters: how many numbers are trained.
        itemsize: bytes of one gradient, as the framework sends it.
        compute: seconds that a rank computes in a step, forward and backward pass and optimizer.
        how: where `compute` comes from.
        ratio: what gradients were measured to compress to, to fp32, in codes of one rank; None: as a sample does.
    """

    name: str
    parameters: int
    itemsize: int
    compute: Interval
    how: str
    ratio: float | None = None

    @property
    def gradient_bytes(self) -> int:
        return self.parameters * self.itemsize


def compute_from_tokens(
    parameters: int, tokens: int, tflops: float | None, efficiency: float | None
) -> tuple[Interval, str]:
    """Seconds of a step in which a rank trains on so many tokens, and how they were found.

    Args:
        tflops: of a rank's device, in 10^12 operations per second.
        efficiency: the share of it that is reached; None: a guess.

    Raises ConfigError where `tflops` is not known.
    """
    if tflops is None:
        raise ConfigError("--tokens: how fast a GPU computes is not known: add --tflops, or give --compute-seconds")
    operations = _FLOPS_PER_PARAMETER * parameters * tokens
    shares = EFFICIENCY if efficiency is None else (efficiency,) * 3
    low, middle, high = (operations / (1e12 * tflops * share) for share in reversed(shares))
    guess = ", a guess" if efficiency is None else ""
    share = f"{shares[0]:.0%} to {shares[2]:.0%}" if efficiency is None else f"{efficiency:.0%}"
    how = f"{tokens:,} tokens x {_FLOPS_PER_PARAMETER} x parameters at {share}{guess} of {tflops:g} TFLOP/s"
    return Interval(low, middle, high), how


def from_run(file: str, itemsize: int) -> Workload:
    """The training that a file of `statistics.jsonl` recorded.

    How much of a step is computing is only known between two ends: collectives may have run beside it, or not.

    Raises ConfigError where the file does not tell enough.
    """
    run = read(file)
    summary = summarize(run)
    ranks = run.header.ranks if run.header else None
    if not ranks or ranks < 2 or not summary.times.steps:
        raise ConfigError(f"--run {file}: needs a header that names 2 ranks or more, and at least 2 steps with times")
    gradients = summary.roles.get("gradient")
    sent = (gradients.plain_bytes if gradients else summary.plain_bytes) / summary.steps
    parameters = round(sent * ranks / (2 * (ranks - 1)) / itemsize)
    times = summary.times
    least = max(0.0, times.step - times.collectives)
    compute = Interval(least, statistics.fmean((least, times.step)), times.step)
    how = f"the step of the run, {times.step:.3g} s, with between all and none of its collectives beside computing"
    ratio = summary.compressed_ratio
    return Workload(file, parameters, itemsize, compute, how, None if ratio is None else ratio * 4 / itemsize)
