"""Tuning file, written by `ncz tune` and named by `transport.tuning`: measurements and the settings chosen from them.

`measure` measures, `decisions` chooses. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Annotated, Literal

from pydantic import Field

from ..config import (
    Allowed,
    CoderCosts,
    Config,
    Integer,
    KiB,
    MiB,
    Number,
    Section,
    expanded_path,
    format_size,
    read_document,
    size_type,
)
from ..errors import ConfigError
from ..whole_files import write_whole

FrameBytes = size_type(16 * KiB, 64 * MiB, (), "bytes from 16 KiB to 64 MiB")
MinBytes = size_type(0, 1 << 50, ("never",), "never, or bytes from 0 to 2^50")
Positive = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Positive, Allowed("a finite number above 0")]
Count = Annotated[Integer, Field(ge=1), Allowed("an integer, 1 or more")]


class SpeedComparison(Section):
    """Seconds of an all-reduce of `nbytes`, plain and compressed: medians over rounds of the slowest rank's time."""

    nbytes: Count
    plain_seconds: Seconds
    compressed_seconds: Seconds

    @property
    def speed_up(self) -> float:
        """Plain time over compressed time."""
        return self.plain_seconds / self.compressed_seconds


class Trial(Section):
    """Seconds of a compressed all-reduce of `nbytes` with one schedule and frame size: median as in SpeedComparison."""

    schedule: Literal["ring", "direct", "halving"]
    frame_bytes: FrameBytes
    nbytes: Count
    seconds: Seconds


class Tuning(Section):
    """Contents of the tuning file: first the choices, then the measurements."""

    format: Literal[1]
    world_size: Annotated[Integer, Field(ge=2), Allowed("an integer, 2 or more")]
    schedule: Literal["ring", "direct", "halving"]
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
        """One line: what was chosen, and why."""
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
        """A copy of `config` in which the settings left open have the values of this file.

        Args:
            with_schedule: whether to fill in the schedule, too.
        """
        return config.resolved(
            schedule=self.schedule if with_schedule else "auto",
            frame_bytes=self.frame_bytes,
            min_bytes=self.min_bytes,
            link_gbps=self.link_gbps,
            costs=self.costs,
        )

    def write(self, path: str | os.PathLike) -> None:
        """Write the file. Raises OSError."""
        text = json.dumps(self.model_dump(mode="json"), indent=2) + "\n"
        write_whole(path, text.encode())

    @classmethod
    def read(cls, path: str | os.PathLike) -> Tuning:
        """Read a file. Raises ConfigError, naming the file, the problem, and the command that writes a new file."""
        try:
            document = read_document(path)
            try:
                return cls(**{str(key): value for key, value in document.items()})
            except ConfigError as error:
                raise ConfigError(f"{os.fspath(path)}: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"transport.tuning: {error}; `ncz tune --output {os.fspath(path)}` writes it") from None


def apply_tuning_file(config: Config, world_size: int | None = None) -> Config:
    """A copy of `config` in which settings left open have the values of the tuning file that `config` names, if any.

    Args:
        world_size: number of ranks; None if unknown. A file that was measured with another number of ranks is applied
            with a warning and without its schedule, which depends on the number of ranks most.

    Raises ConfigError if the file is missing or damaged.
    """
    if config.transport.tuning is None:
        return config
    tuning = Tuning.read(expanded_path(config.transport.tuning))
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
