"""The sections of the configuration.

A field's description, default and `Allowed` text are the single source of the error messages, of
configs/ncclz.schema.json and of the tables in the documentation. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

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
        description="stochastic: round at random, mean error 0. error_bound: round to the nearest. lossless: keep "
        "every bit. auto: stochastic with mode rms, else error_bound.",
    )
    mode: Mode = Field(
        default="rms",
        description="Unit of value. rms: root mean square of a block; rel: its largest magnitude; range: highest less "
        "lowest value; each the largest of all ranks. abs: the tensor's own unit. bits: fixed bits per value.",
    )
    value: Annotated[BoundValue, BOUND_VALUE] = Field(
        default=0.375,
        validate_default=True,  # 0.375 is no number of bits, so mode bits needs a value
        description="Bound of every error of a rank's contribution, in the unit of mode. Larger compresses more. Mode "
        "bits: bits per value.",
    )
    block: Annotated[Block | None, BLOCK] = Field(
        default=None,
        description=f"Elements that share a scale. 0: the whole tensor. null: {SCALE_BLOCK} with mode rms unless "
        f"rotation is on, else {CHUNK}. Mode abs ignores it, mode bits uses {RATE_BLOCK}.",
    )
    seed: Annotated[Integer, Field(ge=0, lt=1 << 64), Allowed("an integer, 0 or more, below 2^64")] = Field(
        default=0,
        description="Seed of stochastic rounding.",
    )
    error_feedback: Annotated[Flag, FLAG] = Field(
        default=False,
        description="Add what a gradient loses to the parameter's next gradient. Takes 2 bytes per element on every "
        "rank (float64: 8).",
    )
    rotation: Annotated[Flag, FLAG] = Field(
        default=False,
        description="Code matrices in the singular vectors of their sums' momentum, in all-reduces of whole "
        "parameters. For the optimizer Muon.",
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
        """`kind`, with auto replaced."""
        if self.kind != "auto":
            return self.kind
        return "stochastic" if self.mode == "rms" else "error_bound"

    @property
    def feeds_back(self) -> bool:
        """Whether sums use error feedback. Kind lossless loses nothing that could be fed back."""
        return self.error_feedback and self.kind != "lossless"

    @property
    def rotates(self) -> bool:
        """Whether sums are coded in the singular vectors of their momentum."""
        return self.rotation and self.kind != "lossless"

    @property
    def bits(self) -> int | None:
        """Bits per value at a fixed rate; None if the rate follows from the data."""
        return int(self.value) if self.mode == "bits" and self.kind != "lossless" else None

    def times(self, factor: float) -> QuantizerConfig:
        """A copy whose bound is `factor` times as large.

        With mode bits: the fewest bits that keep this bound, at most MOST_BITS.
        """
        if factor == 1:
            return self
        if self.bits is None:
            return self.changed(value=self.value * factor)
        smallest = 2.0**-MOST_BITS  # gives MOST_BITS to any number of bits: smaller factors need not be told apart
        levels = (2 ** (self.bits - 1) - 1) / max(factor, smallest)
        bits = next((b for b in range(LEAST_BITS, MOST_BITS) if 2 ** (b - 1) - 1 >= levels), MOST_BITS)
        return self.changed(value=bits)

    def changed(self, **values: Any) -> QuantizerConfig:
        """A copy with other values. Raises ConfigError."""
        return type(self)(**self.model_dump() | values)

    @property
    def block_in_effect(self) -> int:
        """`block`, with null replaced. 0: one scale for the whole tensor, or none is needed."""
        if self.kind == "lossless" or self.mode in ("abs", "bits"):
            return 0
        if self.block is None:
            return SCALE_BLOCK if self.mode == "rms" and not self.rotates else CHUNK
        return self.block

    def describe(self) -> str:
        """A few words for people."""
        if self.kind == "lossless":
            return "lossless"
        kind = self.kind_in_effect.replace("_", " ")
        feedback = ", error feedback" if self.error_feedback else ""
        feedback += ", rotation" if self.rotates else ""
        if self.bits is not None:
            return f"{kind}, {self.bits} bits per value{feedback}"
        block = self.block_in_effect
        per = "" if self.mode == "abs" else f" per {block} elements" if block else " per tensor"
        return f"{kind} {self.mode}:{self.value:g}{per}{feedback}"


Picoseconds = Annotated[Integer, Field(ge=0, lt=10**9), Allowed("an integer from 0 to 999999999")]


class CoderCosts(Section):
    """Picoseconds to encode and decode one value with each coder."""

    raw: Picoseconds
    fixed: Picoseconds
    huffman: Picoseconds
    rans: Picoseconds
    rans_rest: Picoseconds  # extra, for values other than the most frequent one


class EntropyConfig(Section):
    """How the integers are written, without loss."""

    coder: Literal["auto", "raw", "fixed", "huffman", "rans"] = Field(
        default="auto",
        description="raw: 8, 16 or 32 bits per code. fixed: 32 codes at the width of their largest. huffman: short "
        "codes for frequent values. rans: for mostly equal values, on CPUs alone. auto: the fastest to code and send, "
        "by a sample of each frame.",
    )
    predictor: Literal["auto", "none", "delta"] = Field(
        default="auto",
        description="delta: code the difference to the value before, for smooth data. auto: by a sample of each frame.",
    )
    checksum: Annotated[Flag, FLAG] = Field(
        default=False,
        description="Frames carry a checksum, against damage that network and memory miss.",
    )
    costs: Annotated[
        CoderCosts | None,
        Allowed(f"null, or a mapping of {', '.join(CoderCosts.model_fields)} to integers from 0 to 999999999"),
    ] = Field(
        default=None,
        description="Picoseconds to encode and decode a value, for coder auto on CPUs; rans_rest: extra for all but "
        "the most frequent value. null: measured by tuning, else built in.",
    )


class TransportConfig(Section):
    """How frames travel between the ranks."""

    schedule: Literal["auto", "ring", "direct", "halving"] = Field(
        default="auto",
        description="ring: each rank talks to its neighbours. direct: to all. halving: to one at each distance, for "
        "many ranks with CPU tensors. Same bits, except sums with kind lossless. auto: as measured by tuning, else "
        "what costs least by ranks, size, link and distance: up to 16 ranks direct for large tensors (below 0.5 Gbit/s "
        "ring from 5 ranks on) and halving for small ones, above 16 halving (GPUs: direct up to 8 ranks, else ring).",
    )
    frame_bytes: OptionalFrameBytes = Field(
        default=None,
        description="Input bytes per frame. Small frames overlap coding and sending, large ones have less overhead. "
        "null: 4 MiB; 8 MiB from 2.5 Gbit/s on; 64 MiB on GPUs. auto: measured.",
    )
    min_bytes: OptionalMinBytes = Field(
        default=None,
        description="Smaller tensors go uncompressed. null: 1 MiB for each Gbit/s of the link (GPUs: 0.3 MiB, at a "
        "fixed rate 0.1), up to the next power of two, at least 128 KiB; for 2 CPU ranks below 2.5 Gbit/s half of "
        "that, at least 32 KiB; 128 KiB if the link is unknown, and for more than 16 CPU ranks. auto: measured. never: "
        "compress nothing.",
    )
    hierarchy: Hierarchy = Field(
        default="auto",
        description="Sum inside each node uncompressed; compress only between nodes. auto: if there are several "
        "nodes, and one has several ranks. An integer: this many consecutive ranks form a node.",
    )
    connections: Connections = Field(
        default="auto",
        description="TCP connections to each peer. Use 4 or 8 if the provider limits each connection, or over long "
        "distances. auto: 1, 4 or 8, measured with the link (see link_gbps). GPUs: NCCL groups, at most 4.",
    )
    tuning: Annotated[FilePath | None, Allowed("null, or a path")] = Field(
        default=None,
        description="A file from `ncz tune`, for schedule and frame_bytes if auto, min_bytes if auto or null, "
        "link_gbps and costs if null. Relative paths start at the configuration file's folder.",
    )
    link_gbps: Annotated[
        Annotated[Number, Field(ge=1e-3, le=1e4)] | None,
        Allowed("null, or a number from 0.001 to 10000"),
    ] = Field(
        default=None,
        description="Gbit/s between ranks, for coder auto and min_bytes. null: measured when several hosts connect "
        "over gloo (0.2 to 0.5 seconds, more over long distances) or in the first call on GPUs; 1 is assumed between "
        "ranks of one host, and under Horovod.",
    )
    timeout_seconds: Annotated[
        Annotated[Number, Field(ge=1e-3, le=1e7)] | None,
        Allowed("null, or a number from 0.001 to 10000000"),
    ] = Field(
        default=None,
        description="Seconds to wait for another rank. null: the process group's time-out.",
    )

    @property
    def has_fast_link(self) -> bool:
        """Whether the link is known to carry FAST_GBPS or more. Coding beside sending gains nothing there."""
        return self.link_gbps is not None and self.link_gbps >= FAST_GBPS

    def frame_bytes_in_effect(self, on_gpu: bool = False) -> int:
        """`frame_bytes`, with null replaced. auto must have been measured before."""
        if self.frame_bytes is not None:
            return self.frame_bytes
        if on_gpu:
            return GPU_FRAME_BYTES
        return FAST_FRAME_BYTES if self.has_fast_link else FRAME_BYTES


class QuantizerOverrides(Section):
    """Settings of a policy that replace those of `quantizer`. null replaces nothing."""

    kind: Annotated[Kind | None, Allowed(f"null, or one of {', '.join(get_args(Kind))}")] = Field(
        default=None, description="Replaces quantizer.kind."
    )
    mode: Annotated[Mode | None, Allowed(f"null, or one of {', '.join(get_args(Mode))}")] = Field(
        default=None, description="Replaces quantizer.mode."
    )
    value: Annotated[BoundValue | None, BOUND_VALUE] = Field(default=None, description="Replaces quantizer.value.")
    block: Annotated[Block | None, BLOCK] = Field(default=None, description="Replaces quantizer.block.")
    error_feedback: Annotated[Flag | None, FLAG] = Field(default=None, description="Replaces quantizer.error_feedback.")
    rotation: Annotated[Flag | None, FLAG] = Field(default=None, description="Replaces quantizer.rotation.")

    def applied_to(self, quantizer: QuantizerConfig) -> QuantizerConfig:
        """`quantizer` with these settings. Raises ConfigError if the mode does not allow the bound."""
        return quantizer.changed(**self.model_dump(exclude_none=True))


class Policy(Section):
    """Settings for the tensors that match all its conditions. null matches everything."""

    name: Annotated[
        NonEmptyText | Annotated[tuple[NonEmptyText, ...], Field(min_length=1)] | None,
        Allowed("null, or a pattern such as '*.bias', or a list of patterns"),
    ] = Field(
        default=None,
        description="Shell patterns of parameters' names: * is any text, ? any character, [ab] a or b.",
    )
    min_elements: Annotated[StepNumber | None, Allowed("null, or an integer from 0 to 2^50")] = Field(
        default=None, description="The parameter has at least this many elements."
    )
    max_elements: Annotated[StepNumber | None, Allowed("null, or an integer from 0 to 2^50")] = Field(
        default=None, description="The parameter has at most this many elements."
    )
    shape: Annotated[Literal["matrix", "vector"] | None, Allowed("null, matrix or vector")] = Field(
        default=None,
        description="matrix: the parameter has two dimensions or more; vector: one or none. Also where a framework "
        "flattens parameters.",
    )
    dtype: Annotated[Dtype | None, Allowed(f"null, or one of {', '.join(get_args(Dtype))}")] = Field(
        default=None, description="Dtype of the reduced or gathered tensor."
    )
    role: Annotated[Role | None, Allowed(f"null, or one of {', '.join(get_args(Role))}")] = Field(
        default=None, description="Role of the tensor."
    )
    action: Literal["compress", "skip"] = Field(default="compress", description="skip: send uncompressed.")
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

    step: StepNumber = Field(description="First step, counted from 0.")
    times: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        description="Factor of every bound from this step on."
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
        description="Factors of every bound over time; 1 before the first.",
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
        for each in reversed(self.bounds):
            if each.step <= step:
                return each.times
        return 1.0


class GuardConfig(Section):
    """How often compressed sums are compared with uncompressed ones, and what an alarm does."""

    removed: ClassVar[dict[str, str]] = {
        "min_cosine": "delete it. guard.max_relative_error is enough: an error of at most 0.6 means a cosine of at "
        "least 0.8"
    }

    every: StepNumber = Field(default=0, description="Steps between verifications. Each verifies one sum. 0: never.")
    max_relative_error: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        default=0.6,
        description="Alarm if the error exceeds this share of the uncompressed sum, in L2 norms.",
    )
    on_alarm: Literal["warn", "tighten", "stop"] = Field(
        default="warn",
        description="warn: one line on rank 0. tighten: also halve all bounds from the next step on. stop: "
        "AccuracyError on all ranks.",
    )


class StatisticsConfig(Section):
    """What is counted and reported."""

    removed: ClassVar[dict[str, str]] = {
        "history": "delete it. The last 1,000 steps stay in memory; statistics.jsonl keeps all steps"
    }

    report_every: StepNumber = Field(default=0, description="Steps between report lines on rank 0. 0: no report.")
    jsonl: OptionalPath = Field(
        default=None,
        description="File to which rank 0 appends a line of JSON per step, for `ncz report`.",
    )
    tensorboard: OptionalPath = Field(
        default=None,
        description="Folder for rank 0's TensorBoard scalars. Needs `pip install 'ncz_plugins[tensorboard]'`.",
    )
