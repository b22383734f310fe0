"""Training to plan for: number of parameters, and seconds of computing per step."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from ...core.config import Config, QuantizerConfig
from ...core.errors import ConfigError
from ..output import duration
from ..report.read import Run
from ..report.summary import summarize
from ..report.verdict import UNTIMED

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
EFFICIENCY = (0.3, 0.4, 0.5)  # share of a GPU's peak that a training reaches: low, middle, high of a guess
_FLOPS_PER_PARAMETER = 6  # per token: 2 in the forward pass, 4 in the backward pass (Kaplan et al., 2020)


class Interval(NamedTuple):
    """Estimate with lower and upper end."""

    low: float
    middle: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        return cls(value, value, value)

    def times(self, other: Interval) -> Interval:
        """Product with another interval; both must be positive."""
        return Interval(self.low * other.low, self.middle * other.middle, self.high * other.high)


@dataclass(frozen=True)
class Workload:
    """One training.

    Attributes:
        name: name of the training.
        parameters: number of trained parameters.
        itemsize: bytes of one gradient value, as the framework sends it.
        compute: seconds that a rank computes per step: forward pass, backward pass and optimizer.
        how: source of `compute`.
        ratio: measured compression ratio of gradients relative to fp32; None: that of a sample.
        ratio_ranks: number of ranks of the all-reduces in which it was measured; 1 for the codes of one rank.
    """

    name: str
    parameters: int
    itemsize: int
    compute: Interval
    how: str
    ratio: float | None = None
    ratio_ranks: int = 1

    @property
    def gradient_bytes(self) -> int:
        return self.parameters * self.itemsize


def compute_from_tokens(
    parameters: int, tokens: int, tflops: float | None, efficiency: float | None
) -> tuple[Interval, str]:
    """Seconds of a step in which each rank trains on `tokens` tokens, and the formula in words.

    Args:
        parameters: number of parameters.
        tokens: tokens per rank and step.
        tflops: peak of a rank's device, in 10^12 operations per second; None if unknown.
        efficiency: share of the peak that is reached; None: a guess.

    Raises ConfigError if `tflops` is unknown.
    """
    if tflops is None:
        raise ConfigError("--tokens: the speed of the GPU is unknown: add --tflops, or give --compute-seconds instead")
    operations = _FLOPS_PER_PARAMETER * parameters * tokens
    shares = EFFICIENCY if efficiency is None else (efficiency,) * 3
    low, middle, high = (operations / (1e12 * tflops * share) for share in reversed(shares))
    guess = ", a guess" if efficiency is None else ""
    share = f"{shares[0]:.0%} to {shares[2]:.0%}" if efficiency is None else f"{efficiency:.0%}"
    how = f"{tokens:,} tokens x {_FLOPS_PER_PARAMETER} x parameters at {share}{guess} of {tflops:g} TFLOP/s"
    return Interval(low, middle, high), how


def settings_of(run: Run) -> Config:
    """Settings of a run; the defaults if it has none, or if this version does not accept them.

    Without its tuning file, which was measured on the machines of the run, and without the paths of its records.
    """
    document = run.header.config.model_dump(exclude_unset=True) if run.header else {}
    document.pop("statistics", None)
    if isinstance(document.get("transport"), dict):
        document["transport"].pop("tuning", None)
    try:
        return Config(**document)
    except ConfigError:
        return Config()


def from_run(file: str, run: Run, itemsize: int, quantizer: QuantizerConfig) -> Workload:
    """The training recorded in a file that `statistics.jsonl` named.

    Seconds of computing have two ends, as the records don't say how much of the collectives overlapped with computing.

    Args:
        file: path of the file.
        run: its contents.
        itemsize: bytes of one gradient value.
        quantizer: quantizer of the plan. The ratio of the run is used only if its quantizer is the same.

    Raises ConfigError if the file does not say enough.
    """
    summary = summarize(run)
    ranks = run.header.ranks if run.header else None
    if not ranks or ranks < 2 or not summary.times.steps:
        raise ConfigError(f"--run {file}: needs a header that names 2 ranks or more, and at least 2 steps with times")
    gradients = summary.roles.get("gradient")
    sent = (gradients.plain_bytes if gradients else summary.plain_bytes) / summary.steps
    parameters = round(sent * ranks / (2 * (ranks - 1)) / itemsize)
    times = summary.times
    timed = summary.untimed <= UNTIMED  # else steps may have waited for calls whose time is unknown
    least = max(0.0, times.step - times.collectives) if timed else 0.0
    compute = Interval(least, statistics.fmean((least, times.step)), times.step)
    how = f"the step of the run, {duration(times.step)}, with between all and none of its collectives beside computing"
    if run.trainings > 1:
        how += f"; training {run.training} of the {run.trainings} in the file, which --training chooses"
    if not timed:
        how += f"; how long {summary.untimed:.0%} of its bytes took is not known, as they went plain at once"
    ratio = summary.compressed_ratio
    if ratio is not None:
        ratio = ratio * 4 / itemsize if quantizer == settings_of(run).quantizer else None
    return Workload(file, parameters, itemsize, compute, how, ratio, ranks)
