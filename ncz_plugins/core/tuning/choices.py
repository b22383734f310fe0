"""What was measured about the link and the codec, what follows from it, and the file that keeps both.

`Tuning` is the model of the file that `ncz tune` writes and `transport.tuning` names. The decisions are functions of
numbers that all ranks have in common, so that all decide alike. `probe.py` measures; nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from ..config import MIN_BYTES, Allowed, CoderCosts, Config, Integer, KiB, MiB, Number, Section, format_size, size_type
from ..config.documents import read_document
from ..errors import ConfigError

WORTH = 0.97  # of the plain time: what takes longer than this gains too little to be told from noise
_LARGE_BYTES = 16 << 20  # where the time that does not depend on the size no longer counts
_NEXT = 4  # times a size

FrameBytes = size_type(16 * KiB, 64 * MiB, (), "bytes from 16 KiB to 64 MiB")
MinBytes = size_type(0, math.inf, ("never",), "never, or bytes, 0 or more")
Positive = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Positive, Allowed("a finite number above 0")]
Count = Annotated[Integer, Field(ge=1), Allowed("an integer, 1 or more")]


class SpeedComparison(Section):
    """How long one all-reduce of `nbytes` takes plain and compressed: medians, of the slowest rank each time."""

    nbytes: Count
    plain_seconds: Seconds
    compressed_seconds: Seconds

    @property
    def speed_up(self) -> float:
        return self.plain_seconds / self.compressed_seconds


class Trial(Section):
    """How long one compressed all-reduce takes with a schedule and a frame size, likewise."""

    schedule: Literal["ring", "direct"]
    frame_bytes: FrameBytes
    nbytes: Count
    seconds: Seconds


class Tuning(Section):
    """What the tuning file holds: the choices first, then what they follow from."""

    format: Literal[1]
    world_size: Annotated[Integer, Field(ge=2), Allowed("an integer, 2 or more")]
    schedule: Literal["ring", "direct"]
    frame_bytes: FrameBytes
    min_bytes: MinBytes
    link_gbps: Annotated[Number, Field(ge=1e-3, le=1e4), Allowed("a number from 0.001 to 10000")]
    costs: CoderCosts
    latency_seconds: Seconds
    trials: Annotated[tuple[Trial, ...], Field(min_length=1), Allowed("a list of trials, as `ncz tune` writes it")]
    comparisons: Annotated[
        tuple[SpeedComparison, ...], Field(min_length=1), Allowed("a list of comparisons, as `ncz tune` writes it")
    ]
    quantizer: Annotated[str, Field(strict=True), Allowed("text")]
    kernels: Annotated[str, Field(strict=True), Allowed("text")]
    version: Annotated[str, Field(strict=True), Allowed("text")]

    def describe(self) -> str:
        """One line for people: what was chosen, and why."""
        largest = self.comparisons[-1]
        size, slower = format_size(largest.nbytes), f"would take {1 / largest.speed_up:.2f} times as long"
        if self.min_bytes == "never":
            verdict = f"nothing is compressed, as the link is too fast: {size} {slower}"
        else:
            from_size = format_size(self.min_bytes)
            verdict = f"{self.schedule}, frames of {format_size(self.frame_bytes)}, compressed from {from_size}, "
            if largest.nbytes >= self.min_bytes:
                verdict += f"{largest.speed_up:.2f} times as fast at {size}"
            else:
                verdict += f"which there was no time to try: {size} {slower}"
        return (
            f"{self.world_size} ranks, {self.link_gbps:.3g} Gbit/s, {self.latency_seconds * 1e6:.0f} us to agree: "
            f"{verdict}"
        )

    def fill_in(self, config: Config, with_schedule: bool = True) -> Config:
        """`config`, with these choices for what it leaves open."""
        return config.settled(
            schedule=self.schedule if with_schedule else "auto",
            frame_bytes=self.frame_bytes,
            min_bytes=self.min_bytes,
            link_gbps=self.link_gbps,
            costs=self.costs,
        )

    def write(self, path: str | os.PathLike) -> None:
        """Write the file. Raises OSError."""
        text = json.dumps(self.model_dump(mode="json"), indent=2) + "\n"
        partial = f"{os.fspath(path)}.{os.getpid()}"
        with open(partial, "x", encoding="utf-8") as file:  # never through a link that somebody else has put there
            file.write(text)
        os.replace(partial, path)  # whoever reads it finds all of it, or what stood there before

    @classmethod
    def read(cls, path: str | os.PathLike) -> Tuning:
        """What a file holds. Raises ConfigError that names the file, what is wrong, and how to make a new one."""
        try:
            document = read_document(path)
            try:
                return cls(**{str(key): value for key, value in document.items()})
            except ConfigError as error:
                raise ConfigError(f"{os.fspath(path)}: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"transport.tuning: {error}; `ncz tune --output {os.fspath(path)}` writes it") from None


# ------------------------------------------------------------------ what follows from numbers


def best(trials: Sequence[Trial]) -> Trial:
    """The fastest, or the first of those that are as good as that one: the ordinary choice stands first."""
    fastest = min(trial.seconds for trial in trials)
    return next(trial for trial in trials if trial.seconds * WORTH <= fastest)


def crossover(comparisons: Sequence[SpeedComparison]) -> int | str:
    """The smallest size from which compression gains at every size that was measured.

    If it does not gain at the largest one, that is "never". But where there was no time for a large one, it is the next
    size, and no less than the default: what is not known is tried.

    Args:
        comparisons: by size, the smallest first.
    """
    largest = comparisons[-1].nbytes
    least: int | str = "never" if largest >= _LARGE_BYTES else max(_NEXT * largest, MIN_BYTES)
    for comparison in reversed(comparisons):
        if comparison.compressed_seconds > WORTH * comparison.plain_seconds:
            break
        least = comparison.nbytes
    return least


def rans_costs(costs: Sequence[float], rests: Sequence[float]) -> tuple[float, float]:
    """What RANS costs per value and, in addition, per value other than the most frequent one.

    Args:
        costs: per value, of two arrays.
        rests: the share of values other than the most frequent one, in each.
    """
    per_rest = max(0.0, (costs[0] - costs[1]) / (rests[0] - rests[1]))
    return max(0.0, costs[0] - per_rest * rests[0]), per_rest


# ------------------------------------------------------------------ from a file to a configuration


def is_open(config: Config) -> bool:
    """Whether there are sizes to be measured."""
    return "auto" in (config.transport.frame_bytes, config.transport.min_bytes)


def settle(config: Config, world_size: int | None = None) -> Config:
    """The configuration with what its tuning file says, if it names one.

    Args:
        world_size: how many ranks there are, if that is known. A file that was measured with another number is used
            with a warning, and but for the schedule, which depends on it most.

    Raises ConfigError if the file is missing or damaged.
    """
    if config.transport.tuning is None:
        return config
    tuning = Tuning.read(config.transport.tuning)
    differing = []
    if world_size not in (None, tuning.world_size):
        differing.append(f"with {tuning.world_size} ranks, not {world_size}")
    if tuning.quantizer != config.quantizer.describe():
        differing.append(f"with quantizer {tuning.quantizer}, not {config.quantizer.describe()}")
    if differing:
        warnings.warn(
            f"ncz_plugins: {config.transport.tuning} was measured {' and '.join(differing)}: other choices may be "
            "faster; `ncz tune` measures anew",
            RuntimeWarning,
            stacklevel=2,
        )
    return tuning.fill_in(config, with_schedule=world_size in (None, tuning.world_size))
