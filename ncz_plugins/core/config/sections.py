"""The sections of the configuration.

A field's description, default and `Allowed` text are the single source of the error messages, of
configs/ncclz.schema.json and of the tables in the documentation. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from .fields import (
    BLOCK,
    BOUND_VALUE,
    CHUNK,
    FAST_FRAME_BYTES,
    FAST_GBPS,
    FLAG,
    FRAME_BYTES,
    GPU_FRAME_BYTES,
    LEAST_BITS,
    MOST_BITS,
    RATE_BLOCK,
    SCALE_BLOCK,
    Allowed,
    Block,
    BoundValue,
    Connections,
    Dtype,
    FilePath,
    Flag,
    Hierarchy,
    Integer,
    Kind,
    Mode,
    NonEmptyText,
    Number,
    OptionalFrameBytes,
    OptionalMinBytes,
    OptionalPath,
    Role,
    StepNumber,
)
from .section import Section


class QuantizerConfig(Section):
    """How values become integers. Nothing else loses information."""

    kind: Kind = Field(
        default="auto",
        description="error_bound: rounds to the nearest, every element's error stays below the bound; "
        "stochastic: rounds up or down at random, so that the mean error is zero, below the same bound; "
        "lossless: keeps every bit and takes none of the settings below; auto: stochastic with mode rms, error_bound "
        "with the others.",
    )
    mode: Mode = Field(
        default="rms",
        description="The unit of value. abs: the tensor's own unit; rel: the largest magnitude of a block; "
        "rms: the root mean square of a block; range: highest less lowest value of a block. "
        "For rel, rms and range the ranks agree on the largest one (MAX). bits: a fixed rate of so many bits per "
        "value, see the guide about GPUs.",
    )
    value: Annotated[BoundValue, BOUND_VALUE] = Field(
        default=0.375,
        validate_default=True,  # mode bits has none
        description="The error bound of one rank's contribution, in the unit that mode names. Smaller is more "
        "exact, larger compresses more. With mode bits: bits per value, of which more are more exact.",
    )
    block: Annotated[Block | None, BLOCK] = Field(
        default=None,
        description=f"Elements that share one scale; 0: the whole tensor is one block; null: {SCALE_BLOCK} with mode "
        f"rms, {CHUNK} with the others. No effect in mode abs, nor in mode bits, where it is {RATE_BLOCK}.",
    )
    seed: Annotated[Integer, Field(ge=0, lt=1 << 64), Allowed("an integer, 0 or more, below 2^64")] = Field(
        default=0,
        description="Start of the random numbers of kind stochastic: the same seed gives the same results.",
    )
    error_feedback: Annotated[Flag, FLAG] = Field(
        default=False,
        description="Whether what a sum loses of a parameter's gradient is added to that parameter's next "
        "gradient. Takes 4 bytes per element on every rank (8 for float64). No effect with kind "
        "lossless.",
    )

    @field_validator("value")
    @classmethod
    def _within_the_modes_range(cls, value: float, info: ValidationInfo) -> float:
        mode = info.data.get("mode")
        if (mode in ("rel", "range") and value >= 1) or (mode == "rms" and value > 10):
            raise ValueError(f"too large for mode {mode}")
        if mode == "bits" and value not in range(LEAST_BITS, MOST_BITS + 1):
            raise ValueError("not a number of bits, which mode bits asks for")
        return value

    @property
    def kind_in_effect(self) -> str:
        """`kind`, with what auto stands for."""
        if self.kind != "auto":
            return self.kind
        return "stochastic" if self.mode == "rms" else "error_bound"

    @property
    def feeds_back(self) -> bool:
        """Whether sums keep what they lose: nothing is lost by kind lossless."""
        return self.error_feedback and self.kind != "lossless"

    @property
    def bits(self) -> int | None:
        """Bits per value of a fixed rate; None where the rate follows from the data."""
        return int(self.value) if self.mode == "bits" and self.kind != "lossless" else None

    def times(self, factor: float) -> QuantizerConfig:
        """A copy whose bound is `factor` times as large.

        With mode bits: with the fewest bits that keep such a bound, of those that there are.
        """
        if factor == 1:
            return self
        if self.bits is None:
            return self.changed(value=self.value * factor)
        levels = (2 ** (self.bits - 1) - 1) / max(factor, 2.0**-MOST_BITS)  # which takes the most bits from any
        bits = next((b for b in range(LEAST_BITS, MOST_BITS) if 2 ** (b - 1) - 1 >= levels), MOST_BITS)
        return self.changed(value=bits)

    def changed(self, **values: Any) -> QuantizerConfig:
        """A copy with other values. Raises ConfigError."""
        return type(self)(**self.model_dump() | values)

    @property
    def block_in_effect(self) -> int:
        """`block`, with what null stands for, or 0 where one scale serves the whole tensor or none is needed."""
        if self.kind == "lossless" or self.mode in ("abs", "bits"):
            return 0
        if self.block is None:
            return SCALE_BLOCK if self.mode == "rms" else CHUNK
        return self.block

    def describe(self) -> str:
        """A few words for people."""
        if self.kind == "lossless":
            return "lossless"
        kind = self.kind_in_effect.replace("_", " ")
        feedback = ", error feedback" if self.error_feedback else ""
        if self.bits is not None:
            return f"{kind}, {self.bits} bits per value{feedback}"
        block = self.block_in_effect
        per = "" if self.mode == "abs" else f" per {block} elements" if block else " per tensor"
        return f"{kind} {self.mode}:{self.value:g}{per}{feedback}"


Picoseconds = Annotated[Integer, Field(ge=0, lt=10**9), Allowed("an integer, 0 or more, below 10^9")]


class CoderCosts(Section):
    """What coding one value costs here, in picoseconds, encoding and decoding together."""

    raw: Picoseconds
    fixed: Picoseconds
    huffman: Picoseconds
    rans: Picoseconds
    rans_rest: Picoseconds  # in addition, for a value other than the most frequent one


class EntropyConfig(Section):
    """How the integers are written, without loss."""

    coder: Literal["auto", "raw", "fixed", "huffman", "rans"] = Field(
        default="auto",
        description="auto: the coder that takes the least time to code and to send, judged by a sample of each "
        "frame; raw: 8, 16 or 32 bits per code, on GPUs as fixed; fixed: each 32 codes at the width that their "
        "largest needs; huffman: short bit strings for frequent codes; rans: fractions of a bit, for data in "
        "which most codes are the same.",
    )
    predictor: Literal["auto", "none", "delta"] = Field(
        default="auto",
        description="What is subtracted from a code first. auto: whichever pays more, judged by a sample of each "
        "frame; none: nothing; delta: the code before it, which pays for smooth data.",
    )
    checksum: Annotated[Flag, FLAG] = Field(
        default=False,
        description="Whether every frame carries a checksum that its receiver verifies, against errors that "
        "network and memory do not detect themselves.",
    )
    costs: Annotated[
        CoderCosts | None,
        Allowed(f"null, or a mapping of {', '.join(CoderCosts.model_fields)} to integers, 0 or more, below 10^9"),
    ] = Field(
        default=None,
        description="For coder auto on CPUs: picoseconds to encode and decode a value with each coder; rans_rest: "
        "for a value other than the most frequent one. null: the measured costs if there are any, "
        "else costs that were measured beforehand for these kernels.",
    )


class TransportConfig(Section):
    """How frames travel between the ranks."""

    schedule: Literal["auto", "ring", "direct"] = Field(
        default="auto",
        description="auto: the measured choice if tuning is set or frame_bytes or min_bytes is auto, else by the "
        "number of ranks; ring: neighbours only, for many ranks; direct: every rank to every other, "
        "for few ranks. The results are the same to the bit (with kind lossless, except for the "
        "rounding of sums).",
    )
    frame_bytes: OptionalFrameBytes = Field(
        default=None,
        description="Input bytes per frame. Smaller frames overlap coding and transfer better, larger ones have "
        "less overhead. null: 4 MiB; 8 MiB if the link carries 2.5 Gbit/s or more; 64 MiB on a GPU, where each frame "
        "has a fixed cost. auto: the measured choice. In host memory, segments with less than two frames are cut "
        "into two, but for links of 2.5 Gbit/s or more.",
    )
    min_bytes: OptionalMinBytes = Field(
        default=None,
        description="Smaller tensors go uncompressed, as their cost is latency and not size. null: 1 MiB for each "
        "Gbit/s of the link, on a GPU 0.3 MiB, or 0.1 MiB at a fixed rate, up to the next power of two, at least "
        "128 KiB; between two ranks in host memory, on a link of less than 2.5 Gbit/s, half of that, at least 32 KiB; "
        "128 KiB where the link is not known; auto: the measured choice; never: nothing is compressed, which "
        "auto chooses where the link is too fast.",
    )
    hierarchy: Hierarchy = Field(
        default="auto",
        description="Whether the ranks of a node first add up uncompressed, so that only the traffic between "
        "nodes is compressed. auto: if there are several nodes with the same number of ranks, 2 or "
        "more; off: never; an integer: this many consecutive ranks form a node.",
    )
    connections: Connections = Field(
        default="auto",
        description="TCP connections with each other rank for frames in host memory, among at most 16 ranks. Several "
        "fill a link that limits each, as clouds do, or that is far. auto: 4 or 8 if ranks that measure their "
        "link, see link_gbps, find that so many carry more than fewer do, else 1. Between GPUs as many NCCL groups, 4 "
        "at most, which gather large frames side by side; auto: 2 or 4 likewise.",
    )
    tuning: Annotated[FilePath | None, Allowed("null, or the path of a file that `ncz tune` wrote")] = Field(
        default=None,
        description="A file that `ncz tune` wrote. It fills in schedule, frame_bytes and min_bytes where they are "
        "auto, and link_gbps and entropy.costs where they are null. null: frame_bytes and min_bytes "
        "are measured at the start if they are auto. A relative path in a file starts at that file's "
        "folder.",
    )
    link_gbps: Annotated[
        Annotated[Number, Field(ge=1e-3, le=1e4)] | None,
        Allowed("null, or a number from 0.001 to 10000"),
    ] = Field(
        default=None,
        description="Speed of the link between ranks in Gbit/s, for coder auto, since the slower the link, the more "
        "time coding may take, and for min_bytes. null: measured if min_bytes is null too: when ranks of several "
        "hosts connect over gloo, which takes 0.2 to 0.5 seconds, more with a long round trip, and over NCCL in the "
        "first call of a tensor on a GPU; else coder auto takes what Linux states for the network interface that gloo "
        "uses, else 1. From 2.5 on, large tensors in host memory are also measured as a whole before their first frame "
        "is sent.",
    )
    timeout_seconds: Annotated[
        Annotated[Number, Field(ge=1e-3, le=1e7)] | None,
        Allowed("null, or a number from 0.001 to 10000000"),
    ] = Field(
        default=None,
        description="Seconds to wait for another rank before giving up; null: the process group's own time-out.",
    )

    @property
    def has_fast_link(self) -> bool:
        """Whether the link is known to be so fast that nothing is gained by coding while it carries something."""
        return self.link_gbps is not None and self.link_gbps >= FAST_GBPS

    def frame_bytes_in_effect(self, on_gpu: bool = False) -> int:
        """`frame_bytes`, or what it stands for where it is null. What is auto must have been measured."""
        if self.frame_bytes is not None:
            return self.frame_bytes
        if on_gpu:
            return GPU_FRAME_BYTES
        return FAST_FRAME_BYTES if self.has_fast_link else FRAME_BYTES


class QuantizerOverrides(Section):
    """Settings that replace those of `quantizer` for some tensors; null replaces nothing."""

    kind: Annotated[Kind | None, Allowed(f"null, or one of {', '.join(get_args(Kind))}")] = Field(
        default=None, description="In place of quantizer.kind."
    )
    mode: Annotated[Mode | None, Allowed(f"null, or one of {', '.join(get_args(Mode))}")] = Field(
        default=None, description="In place of quantizer.mode."
    )
    value: Annotated[BoundValue | None, BOUND_VALUE] = Field(default=None, description="In place of quantizer.value.")
    block: Annotated[Block | None, BLOCK] = Field(default=None, description="In place of quantizer.block.")
    error_feedback: Annotated[Flag | None, FLAG] = Field(
        default=None, description="In place of quantizer.error_feedback."
    )

    def applied_to(self, quantizer: QuantizerConfig) -> QuantizerConfig:
        """`quantizer` with these settings. Raises ConfigError for a bound that the mode does not allow."""
        return quantizer.changed(**self.model_dump(exclude_none=True))


class Policy(Section):
    """What is done with some tensors. A tensor must match everything that is given; null matches everything."""

    name: Annotated[
        NonEmptyText | Annotated[tuple[NonEmptyText, ...], Field(min_length=1)] | None,
        Allowed("null, or a pattern such as '*.bias', or a list of patterns"),
    ] = Field(
        default=None,
        description="Names of parameters, as patterns of the shell: * stands for any characters, ? for one, "
        "[ab] for one of these.",
    )
    min_elements: Annotated[StepNumber | None, Allowed("null, or an integer from 0 to 2^50")] = Field(
        default=None, description="The whole parameter has at least this many elements."
    )
    max_elements: Annotated[StepNumber | None, Allowed("null, or an integer from 0 to 2^50")] = Field(
        default=None, description="The whole parameter has at most this many elements."
    )
    dtype: Annotated[Dtype | None, Allowed(f"null, or one of {', '.join(get_args(Dtype))}")] = Field(
        default=None, description="The dtype of what is reduced or gathered."
    )
    role: Annotated[Role | None, Allowed(f"null, or one of {', '.join(get_args(Role))}")] = Field(
        default=None, description="The kind of tensor."
    )
    action: Literal["compress", "skip"] = Field(default="compress", description="skip: it goes uncompressed.")
    quantizer: QuantizerOverrides = QuantizerOverrides()

    def describe(self) -> str:
        """A few words for people."""
        given = self.model_dump(exclude_none=True, exclude={"action", "quantizer"})
        names = given.pop("name", ())
        fits = [" or ".join([names] if isinstance(names, str) else names)] if names else []
        fits += [f"{key} {value}" for key, value in given.items()]
        changes = [f"{key} {value}" for key, value in self.quantizer.model_dump(exclude_none=True).items()]
        return f"{', '.join(fits) or 'all'}: {self.action}{': ' if changes else ''}{', '.join(changes)}"


class Bounds(Section):
    """A factor for every bound, from a step on."""

    step: StepNumber = Field(description="The first step, counted from 0.")
    times: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        description="What every bound is multiplied by from then on."
    )

    def describe(self) -> str:
        """A few words for people."""
        return f"from step {self.step} on times {self.times:g}"


class StepsConfig(Section):
    """What changes over the steps of a training."""

    warmup: StepNumber = Field(default=0, description="Steps at the beginning that go uncompressed.")
    bounds: Annotated[
        tuple[Bounds, ...], Allowed("a list of mappings with the keys step and times, in the order of their steps")
    ] = Field(
        default=(),
        description="From `step` on, every bound is multiplied by `times`. Before the first of these steps, by 1.",
    )

    @field_validator("bounds")
    @classmethod
    def _in_order(cls, bounds: tuple[Bounds, ...]) -> tuple[Bounds, ...]:
        steps = [each.step for each in bounds]
        if steps != sorted(set(steps)):
            raise ValueError("not in order")
        return bounds

    def bounds_times(self, step: int) -> float:
        """What every bound is multiplied by in a step, counted from 0."""
        return next((each.times for each in reversed(self.bounds) if each.step <= step), 1.0)


class GuardConfig(Section):
    """Whether and how often compressed sums are compared with uncompressed ones during a training."""

    every: StepNumber = Field(
        default=0, description="Steps between verifications of one compressed sum each; 0: never."
    )
    max_relative_error: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        default=0.6,
        description="Alarm if the difference between both sums is larger than this, as a share of the "
        "uncompressed sum (both in L2).",
    )
    min_cosine: Annotated[Annotated[Number, Field(ge=-1, le=1)], Allowed("a number from -1 to 1")] = Field(
        default=0.85, description="Alarm if the cosine between both sums is smaller than this."
    )
    on_alarm: Literal["warn", "tighten", "stop"] = Field(
        default="warn",
        description="warn: one line on rank 0; tighten: also halve all bounds from the next step on; "
        "stop: AccuracyError on all ranks.",
    )


class StatisticsConfig(Section):
    """What is counted and reported."""

    report_every: StepNumber = Field(default=0, description="Steps between report lines on rank 0; 0: no report.")
    history: Annotated[Integer, Field(ge=1, le=10**7), Allowed("an integer from 1 to 10000000")] = Field(
        default=1000, description="Steps whose statistics are kept in memory."
    )
    jsonl: OptionalPath = Field(
        default=None,
        description="Path of a file to which rank 0 appends one line of JSON per step, for `ncz report`; null: none. "
        "Relative to the working directory.",
    )
    tensorboard: OptionalPath = Field(
        default=None,
        description="Folder in which rank 0 writes the same numbers as scalars for TensorBoard; null: none. Needs "
        "pip install 'ncz_plugins[tensorboard]'.",
    )
