"""The configuration: what may be set, what it means, and how it is read.

`Config` is the one model. Its fields' descriptions, defaults and `Allowed` texts are the single
source of the error messages, of configs/ncclz.schema.json and of the tables in
docs/reference/configuration.md. Nothing here imports torch, so that checking a file is quick.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..errors import ConfigError
from .documents import read_document, shorten

SHORT_FORM = "ncclz"  # stands for all defaults, wherever a configuration is expected
DEEPSPEED_KEY = "communication_compression"  # our key at the top level of a DeepSpeed configuration
CHUNK = 4096  # as kernels.format.CHUNK, repeated here because importing that imports torch

KiB, MiB = 1 << 10, 1 << 20
FRAME_BYTES, MIN_BYTES = 4 * MiB, 128 * KiB  # where nothing else is said or measured
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KiB, "MiB": MiB, "GiB": 1 << 30}
_SIZE = re.compile(rf"^([0-9]+) ?({'|'.join(_UNITS)})$")

# ------------------------------------------------------------------ types of the fields


@dataclass(frozen=True)
class Allowed:
    """What a field accepts, in the words that error messages and the documentation use."""

    text: str


def size_type(minimum: int, maximum: float, words: tuple[str, ...], allowed: str) -> Any:
    """The type of a number of bytes, which may be written as a string such as "64KiB", or of one of `words`."""

    def parse(value: object) -> int | str:
        if value in words:
            return value
        match = _SIZE.match(value) if isinstance(value, str) else None
        size = int(match[1]) * _UNITS[match[2]] if match else value
        if type(size) is not int or not minimum <= size <= maximum:  # a bool is an int, but not a size
            raise ValueError(allowed)
        return size

    integer = {"type": "integer", "minimum": minimum} | ({"maximum": maximum} if maximum < math.inf else {})
    text = {"type": "string", "pattern": _SIZE.pattern}
    schema = {"anyOf": [integer, text, {"enum": list(words)}]}
    return Annotated[int | str, PlainValidator(parse), WithJsonSchema(schema), Allowed(allowed)]


_HIERARCHY = "auto, off, or an integer, 2 or more"


def _parse_hierarchy(value: object) -> int | str:
    if value is False:  # what YAML makes of a bare off
        return "off"
    if value in ("auto", "off") or (type(value) is int and value >= 2):
        return value
    raise ValueError(_HIERARCHY)


# Strict: a boolean or a string is not a number. An integer does pass for a float.
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
FrameBytes = size_type(
    16 * KiB, 64 * MiB, ("auto",), "auto, or bytes from 16 KiB to 64 MiB: an integer, or a string such as '1MiB'"
)
MinBytes = size_type(
    0, math.inf, ("auto", "never"), "auto, never, or bytes, 0 or more: an integer, or a string such as '64KiB'"
)
Hierarchy = Annotated[
    int | str,
    PlainValidator(_parse_hierarchy),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "off", False]}, {"type": "integer", "minimum": 2}]}),
    Allowed(_HIERARCHY),
]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Path = Annotated[Text | None, Allowed("null, or a path")]
Role = Literal["gradient", "parameter", "activation"]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Step = Annotated[Integer, Field(ge=0), Allowed("an integer, 0 or more")]

# Of the quantizer, for which policies can change them.
Kind = Literal["error_bound", "stochastic", "lossless"]
Mode = Literal["abs", "rel", "rms", "range"]
BoundValue = Annotated[Number, Field(gt=0)]
Block = Annotated[Integer, Field(ge=0, multiple_of=CHUNK)]
_BOUND_VALUE = Allowed("a finite number above 0; with mode rel or range below 1; with mode rms at most 10")
_BLOCK = Allowed(f"0, or a positive multiple of {CHUNK}")
_FLAG = Allowed("true, false")

# ------------------------------------------------------------------ the model


class Section(BaseModel):
    """Immutable, refuses unknown keys, and reports every problem in one `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None

    # pydantic then builds nested sections without calling __init__, and its errors keep their full path.
    __init__.__pydantic_base_init__ = True


class QuantizerConfig(Section):
    """How values become integers: the only step that loses anything."""

    kind: Kind = Field(
        default="error_bound",
        description="error_bound: rounds to the nearest, every element's error stays below the bound; "
        "stochastic: rounds up or down at random, so that the mean error is zero, below the same bound; "
        "lossless: keeps every bit and takes none of the settings below.",
    )
    mode: Mode = Field(
        default="rms",
        description="The unit of value. abs: the tensor's own unit; rel: the largest magnitude of a block; "
        "rms: the root mean square of a block; range: highest less lowest value of a block. "
        "For rel, rms and range the ranks agree on the largest one (MAX).",
    )
    value: Annotated[BoundValue, _BOUND_VALUE] = Field(
        default=0.25,
        description="The error bound of one rank's contribution, in the unit that mode names. "
        "Smaller is more exact, larger compresses more.",
    )
    block: Annotated[Block, _BLOCK] = Field(
        default=CHUNK,
        description="Elements that share one scale; 0: the whole tensor is one block. Without effect in mode abs.",
    )
    seed: Annotated[Integer, Field(ge=0, lt=1 << 64), Allowed("an integer, 0 or more, below 2^64")] = Field(
        default=0,
        description="Where the random numbers of kind stochastic begin: the same seed gives the same results.",
    )
    error_feedback: Annotated[Flag, _FLAG] = Field(
        default=False,
        description="Whether what a sum loses of a parameter's gradient is added to the next one. Takes 4 bytes per "
        "element on every rank (8 for float64). Without effect for kind lossless.",
    )

    @field_validator("value")
    @classmethod
    def _within_the_modes_range(cls, value: float, info: ValidationInfo) -> float:
        mode = info.data.get("mode")
        if (mode in ("rel", "range") and value >= 1) or (mode == "rms" and value > 10):
            raise ValueError(f"too large for mode {mode}")
        return value

    @property
    def feeds_back(self) -> bool:
        """Whether sums keep what they lose: nothing is lost by kind lossless."""
        return self.error_feedback and self.kind != "lossless"

    def times(self, factor: float) -> QuantizerConfig:
        """A copy whose bound is `factor` times as large."""
        return self if factor == 1 else self.changed(value=self.value * factor)

    def changed(self, **values: Any) -> QuantizerConfig:
        """A copy with other values. Raises ConfigError."""
        return type(self)(**self.model_dump() | values)

    @property
    def block_in_effect(self) -> int:
        """`block`, or 0 where one scale serves the whole tensor or none is needed."""
        return 0 if self.kind == "lossless" or self.mode == "abs" else self.block

    def describe(self) -> str:
        """A few words for people."""
        if self.kind == "lossless":
            return "lossless"
        per = "" if self.mode == "abs" else f" per {self.block} elements" if self.block else " per tensor"
        feedback = ", error feedback" if self.error_feedback else ""
        return f"{self.kind.replace('_', ' ')} {self.mode}:{self.value:g}{per}{feedback}"


Picoseconds = Annotated[Integer, Field(ge=0, lt=10**9), Allowed("an integer, 0 or more, below 10^9")]


class CoderCosts(Section):
    """What coding one value costs here, in picoseconds, encoding and decoding together."""

    raw: Picoseconds
    fixed: Picoseconds
    huffman: Picoseconds
    rans: Picoseconds
    rans_rest: Picoseconds  # per value other than the most frequent one


class EntropyConfig(Section):
    """How the integers are written: lossless."""

    coder: Literal["auto", "raw", "fixed", "huffman", "rans"] = Field(
        default="auto",
        description="auto: the one with the least time to code and to send, by a sample of each frame; "
        "raw: 8, 16 or 32 bits per code; fixed: each 32 codes at the width that their largest needs; "
        "huffman: short bit strings for frequent codes; "
        "rans: fractions of a bit, for data in which most codes are the same.",
    )
    predictor: Literal["auto", "none", "delta"] = Field(
        default="auto",
        description="What is subtracted from a code first. auto: whichever pays more, by a sample of each frame; "
        "none: nothing; delta: the code before it, which pays for smooth data.",
    )
    checksum: Annotated[Flag, _FLAG] = Field(
        default=False,
        description="Whether every frame carries a checksum that its receiver verifies, "
        "against errors that the network and the memory do not notice themselves.",
    )
    costs: Annotated[
        CoderCosts | None,
        Allowed(f"null, or a mapping of {', '.join(CoderCosts.model_fields)} to integers, 0 or more, below 10^9"),
    ] = Field(
        default=None,
        description="For coder auto on CPUs: picoseconds to encode and decode a value with each coder, rans_rest for a "
        "value other than the most frequent one; null: as measured where something is, else what was measured "
        "beforehand for these kernels.",
    )


class TransportConfig(Section):
    """How frames travel between the ranks."""

    schedule: Literal["auto", "ring", "direct"] = Field(
        default="auto",
        description="auto: as measured where tuning is set or frame_bytes or min_bytes is auto, else chosen from the "
        "number of ranks; ring: neighbours only, for many ranks; "
        "direct: every rank to every other, for few ranks. The results are the same to the bit "
        "(with kind lossless, but for the rounding of sums).",
    )
    frame_bytes: FrameBytes = Field(
        default=FRAME_BYTES,
        description="Input bytes per frame. Smaller frames overlap coding and transfer better, "
        "larger ones have less overhead. auto: as measured.",
    )
    min_bytes: MinBytes = Field(
        default=MIN_BYTES,
        description="Tensors smaller than this go uncompressed, as latency and not size is what they cost. "
        "auto: as measured; never: nothing is compressed, which is what auto comes to where the link is too fast.",
    )
    hierarchy: Hierarchy = Field(
        default="auto",
        description="Whether ranks of one node add up uncompressed, so that only what goes between nodes is "
        "compressed. auto: where there are several nodes with equally many, at least 2, ranks each; off: never; "
        "an integer: so many consecutive ranks form a node.",
    )
    tuning: Annotated[Text | None, Allowed("null, or the path of a file that `ncz tune` wrote")] = Field(
        default=None,
        description="A file with measured values. They replace auto in schedule, frame_bytes and min_bytes, and null "
        "in link_gbps and entropy.costs. null: no file; if frame_bytes or min_bytes is auto, the ranks measure at the "
        "start. In a file, a relative path starts at that file's folder.",
    )
    link_gbps: Annotated[
        Annotated[Number, Field(ge=1e-3, le=1e4)] | None,
        Allowed("null, or a number from 0.001 to 10000"),
    ] = Field(
        default=None,
        description="Speed of the link between ranks in Gbit/s, for coder auto: the slower the link, the more time "
        "coding may take; null: as measured where something is; else what Linux states for the network interface that "
        "gloo uses, or else 1. From 2.5 on, also large tensors are measured as a whole before their first frame goes.",
    )
    timeout_seconds: Annotated[
        Annotated[Number, Field(gt=0)] | None,
        Allowed("null, or a finite number above 0"),
    ] = Field(
        default=None,
        description="Seconds to wait for another rank before giving up; null: the process group's own time-out.",
    )
    wait: Literal["host", "stream"] = Field(
        default="host",
        description="On a GPU, what a call that is not asynchronous holds up until its result is there. stream: the "
        "current CUDA stream alone, so that the host goes on; what goes wrong shows at the next call, or when the step "
        "ends. docs/guides/gpus.md says what that asks of a program.",
    )


class QuantizerOverrides(Section):
    """Settings of `quantizer` that differ for some tensors; null: as there."""

    kind: Annotated[Kind | None, Allowed(f"null, or one of {', '.join(get_args(Kind))}")] = Field(
        default=None, description="In place of quantizer.kind."
    )
    mode: Annotated[Mode | None, Allowed(f"null, or one of {', '.join(get_args(Mode))}")] = Field(
        default=None, description="In place of quantizer.mode."
    )
    value: Annotated[BoundValue | None, _BOUND_VALUE] = Field(default=None, description="In place of quantizer.value.")
    block: Annotated[Block | None, _BLOCK] = Field(default=None, description="In place of quantizer.block.")
    error_feedback: Annotated[Flag | None, _FLAG] = Field(
        default=None, description="In place of quantizer.error_feedback."
    )

    def applied_to(self, quantizer: QuantizerConfig) -> QuantizerConfig:
        """`quantizer` with these settings. Raises ConfigError for a bound that the mode does not allow."""
        return quantizer.changed(**self.model_dump(exclude_none=True))


class Policy(Section):
    """What is done with tensors of a kind. All that is given must fit; what is null fits everything."""

    name: Annotated[
        Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None,
        Allowed("null, or a pattern such as '*.bias', or a list of patterns"),
    ] = Field(
        default=None,
        description="Names of parameters, as patterns of the shell: * stands for any characters, ? for one, "
        "[ab] for one of these.",
    )
    min_elements: Annotated[Step | None, Allowed("null, or an integer, 0 or more")] = Field(
        default=None, description="The whole parameter has at least so many elements."
    )
    max_elements: Annotated[Step | None, Allowed("null, or an integer, 0 or more")] = Field(
        default=None, description="The whole parameter has at most so many elements."
    )
    dtype: Annotated[Dtype | None, Allowed(f"null, or one of {', '.join(get_args(Dtype))}")] = Field(
        default=None, description="What is reduced or gathered has this dtype."
    )
    role: Annotated[Role | None, Allowed(f"null, or one of {', '.join(get_args(Role))}")] = Field(
        default=None, description="What the tensor is."
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
    """How much larger or smaller every bound is from a step on."""

    step: Step = Field(description="The first step, counted from 0.")
    times: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        description="What every bound is multiplied by from then on."
    )

    def describe(self) -> str:
        """A few words for people."""
        return f"from step {self.step} on times {self.times:g}"


class StepsConfig(Section):
    """What changes in the course of a training."""

    warmup: Step = Field(default=0, description="So many steps at the beginning go uncompressed.")
    bounds: Annotated[
        tuple[Bounds, ...], Allowed("a list of mappings with the keys step and times, in the order of their steps")
    ] = Field(
        default=(),
        description="From `step` on, every bound is `times` as large as it would be. Before the first, as it is.",
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
    """Whether compressed sums are compared with uncompressed ones in the course of a training."""

    every: Step = Field(default=0, description="Steps between verifications of one compressed sum each; 0: never.")
    max_relative_error: Annotated[BoundValue, Allowed("a finite number above 0")] = Field(
        default=0.5,
        description="Alarm if the difference is more than this, as a share of the uncompressed sum (both in L2).",
    )
    min_cosine: Annotated[Annotated[Number, Field(ge=-1, le=1)], Allowed("a number from -1 to 1")] = Field(
        default=0.8, description="Alarm if the cosine between both is less than this."
    )
    on_alarm: Literal["warn", "tighten", "stop"] = Field(
        default="warn",
        description="warn: one line on rank 0; tighten: also halve all bounds from the next step on; "
        "stop: AccuracyError on all ranks.",
    )


class StatisticsConfig(Section):
    """What is counted and reported."""

    report_every: Step = Field(default=0, description="Steps between report lines on rank 0; 0: no report.")
    history: Annotated[Integer, Field(ge=1), Allowed("an integer, 1 or more")] = Field(
        default=1000, description="Steps whose statistics are kept in memory."
    )
    jsonl: Path = Field(
        default=None,
        description="Path of a file to which rank 0 appends one line of JSON per step, for `ncz report`; null: none. "
        "Relative to the working directory.",
    )
    tensorboard: Path = Field(
        default=None,
        description="Folder in which rank 0 writes the same as scalars for TensorBoard; null: none. "
        "Needs pip install 'ncz_plugins[tensorboard]'.",
    )


class Config(Section):
    """All settings. `Config()` holds the defaults; `Config.load` reads every other form.

    Immutable and hashable. Raises `ConfigError` for any invalid, unknown or mistyped setting.
    """

    quantizer: QuantizerConfig = QuantizerConfig()
    entropy: EntropyConfig = EntropyConfig()
    transport: TransportConfig = TransportConfig()
    policies: Annotated[
        tuple[Policy, ...], Allowed(f"a list of mappings with the keys {', '.join(Policy.model_fields)}")
    ] = Field(
        default=(),
        description="What differs for some parameters. The first that fits counts; what fits none gets `quantizer`.",
    )
    steps: StepsConfig = StepsConfig()
    guard: GuardConfig = GuardConfig()
    roles: Annotated[
        tuple[Role, ...],
        Field(min_length=1, json_schema_extra={"uniqueItems": True}),
        Allowed(f"a list of one or more of {', '.join(get_args(Role))}, each at most once"),
    ] = Field(default=("gradient",), description="The kinds of tensors that are compressed; all others are left alone.")
    statistics: StatisticsConfig = StatisticsConfig()

    @field_validator("roles")
    @classmethod
    def _unique_in_a_fixed_order(cls, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        if len(set(roles)) < len(roles):
            raise ValueError("a role is repeated")
        return tuple(role for role in get_args(Role) if role in roles)

    @model_validator(mode="after")
    def _bounds_stay_within_their_modes_range(self) -> Config:
        for where, quantizer in self._quantizers():
            for at, each in enumerate(self.steps.bounds):
                try:
                    quantizer.times(each.times)
                except ConfigError as error:
                    raise ConfigError(
                        f"steps.bounds[{at}].times: {each.times:g} is too much for {where} {quantizer.value:g}: {error}"
                    ) from None
        return self

    def _quantizers(self) -> Iterator[tuple[str, QuantizerConfig]]:
        """All that tensors may get, with where they stand."""
        yield "quantizer.value", self.quantizer
        for at, policy in enumerate(self.policies):
            try:
                yield f"policies[{at}].quantizer.value", policy.quantizer.applied_to(self.quantizer)
            except ConfigError as error:
                raise ConfigError(f"policies[{at}].quantizer, with the rest of quantizer: {error}") from None

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike | None = None) -> Config:
        """The configuration that `source` describes.

        source: None or "ncclz" (all defaults), a mapping, the path of a .yaml, .yml or .json file,
        or a `Config`, which is returned as it is. A key "$schema", which editors use, is ignored.
        Raises `ConfigError` that names the file, where there is one, and every problem in it.
        """
        if isinstance(source, Config):
            return source
        if source is None or source == SHORT_FORM:
            return cls()
        if isinstance(source, Mapping):
            return _from_mapping(source)
        if isinstance(source, str) and not os.path.exists(source):
            raise ConfigError(_explain_missing(source))
        if isinstance(source, (str, os.PathLike)):
            document = read_document(source)
            try:
                return _from_mapping(document)._seen_from(os.path.dirname(os.fspath(source)))
            except ConfigError as error:
                raise ConfigError(f"{os.fspath(source)}: {error}") from None
        raise ConfigError(
            f"{source!r} ({type(source).__name__}) is not a configuration; "
            f"allowed: '{SHORT_FORM}', a mapping, or the path of a .yaml, .yml or .json file"
        )

    def with_transport(self, **values: Any) -> Config:
        """A copy with these settings of `transport` in place of its own."""
        settings = self.model_dump()
        return type(self)(**settings | {"transport": settings["transport"] | values})

    def settled(
        self,
        *,
        schedule: str = "auto",
        frame_bytes: int = FRAME_BYTES,
        min_bytes: int | str = MIN_BYTES,
        link_gbps: float | None = None,
        costs: CoderCosts | None = None,
    ) -> Config:
        """A copy in which what is left open has these values: what is auto, and a link or costs that are null.

        The tuning file is then of no further interest: the copy names none.
        """
        given = {"schedule": schedule, "frame_bytes": frame_bytes, "min_bytes": min_bytes, "link_gbps": link_gbps}
        taken = {key: value for key, value in given.items() if getattr(self.transport, key) in ("auto", None)}
        entropy = self.entropy.model_copy(update={"costs": self.entropy.costs or costs})
        return self.with_transport(**taken, tuning=None).model_copy(update={"entropy": entropy})

    def canonical(self) -> str:
        """Compact JSON with sorted keys: equal text means equal settings. Ranks compare this."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def describe(self) -> str:
        """One short line for people."""
        frames = self.transport.frame_bytes
        predictor = "" if self.entropy.predictor == "auto" else f", predictor {self.entropy.predictor}"
        checksum = ", checksums" if self.entropy.checksum else ""
        return (
            f"{self.quantizer.describe()}, coder {self.entropy.coder}{predictor}{checksum}, "
            f"schedule {self.transport.schedule}, frames {frames if frames == 'auto' else format_size(frames)}, "
            f"roles {'+'.join(self.roles)}"
            + (f", {len(self.policies)} policies" if self.policies else "")
            + (f", {self.steps.warmup} steps of warm-up" if self.steps.warmup else "")
            + (", a schedule of bounds" if self.steps.bounds else "")
            + (f", verified every {self.guard.every} steps" if self.guard.every else "")
        )

    def _seen_from(self, folder: str) -> Config:
        """A copy whose paths, if relative, start at `folder`."""
        if self.transport.tuning is None:
            return self
        return self.with_transport(tuning=os.path.join(folder, self.transport.tuning))


def _from_mapping(document: Mapping[str, Any]) -> Config:
    if is_deepspeed(document):
        raise ConfigError(
            f"this is a DeepSpeed configuration; allowed: one of ncz_plugins, "
            f"such as the value of its key '{DEEPSPEED_KEY}'"
        )
    return Config(**{key: value for key, value in _with_text_keys(document).items() if key != "$schema"})


def _with_text_keys(document: Mapping[Any, Any]) -> dict[str, Any]:
    """YAML allows any key (`on` is True); as text, a strange one is reported like any unknown key."""
    return {str(k): _with_text_keys(v) if isinstance(v, Mapping) else v for k, v in document.items()}


# ------------------------------------------------------------------ what the documentation is made of


def settings(
    section: type[BaseModel] = Config, prefix: str = "", of_elements: bool = False
) -> Iterator[tuple[str, Any, str, str]]:
    """(dotted key, default, what is allowed, description) of every setting, in order.

    of_elements: after a list, also the settings of its elements, as "policies[].name".
    """
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from settings(field.annotation, f"{prefix}{name}.", of_elements)
            continue
        default = "required" if field.is_required() else field.default
        yield prefix + name, default, _allowed(section, name), field.description
        if of_elements and (element := _element(field.annotation)):
            yield from settings(element, f"{prefix}{name}[].", of_elements)


def json_schema() -> dict[str, Any]:
    """JSON Schema of our files, for editors."""
    schema = Config.model_json_schema()
    schema |= {"title": "Configuration of ncz_plugins", "description": "Every key may be left out."}
    schema["properties"] = {"$schema": {"type": "string", "description": "For editors."}} | schema["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def format_size(size: int) -> str:
    """Bytes in the largest binary unit that holds them evenly: 1048576 is "1 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}"
    return f"{size} B"


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _element(annotation: object) -> type[BaseModel] | None:
    """The section that each element of a list is, if that is what they are."""
    element = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else None
    return element if _is_section(element) else None


def _allowed(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if _is_section(field.annotation):
        return f"a mapping with the keys {', '.join(field.annotation.model_fields)}"
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(str, get_args(field.annotation)))
    return next(note.text for note in field.metadata if isinstance(note, Allowed))


# ------------------------------------------------------------------ explaining what is wrong


def _explain(error: ValidationError, section: type[BaseModel]) -> str:
    """Every problem that pydantic found, in our words: one line if there is one, else a list."""
    lines = {}  # by key, as several elements of one list may be wrong
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # it says all
            lines.setdefault(str(cause), str(cause))
            continue
        owner, path, key = _locate(section, problem["loc"])
        value = shorten(problem["input"])
        if path[-1] not in owner.model_fields:
            line = f"{key}: unknown key (value {value}); "
            if meant := _closest_key(key, section, owner):
                line += f"did you mean {meant}? "
            line += f"allowed: {', '.join(owner.model_fields)}"
        elif problem["type"] == "missing" and path[-1] == problem["loc"][-1]:
            line = f"{key}: is missing; allowed: {_allowed(owner, path[-1])}"
        else:
            line = f"{key}: {value} is not allowed; allowed: {_allowed(owner, path[-1])}"
        lines.setdefault(key, line)
    if len(lines) == 1:
        return next(iter(lines.values()))
    return f"{len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines.values())


def _locate(section: type[BaseModel], location: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str], str]:
    """The section that owns the setting at `location`, the setting's path, and its key with indices for people."""
    owner, path, key = section, [str(location[0])], str(location[0])
    for step in location[1:]:
        field = owner.model_fields.get(path[-1])
        if field is None:
            break
        if isinstance(step, int) and _element(field.annotation):
            key += f"[{step}]"
            continue
        inner = field.annotation if _is_section(field.annotation) else _element(field.annotation)
        if inner is None:
            break
        owner = inner
        path.append(str(step))
        key += f".{step}"
    return owner, path, key


def _closest_key(key: str, root: type[BaseModel], owner: type[BaseModel]) -> str | None:
    """The dotted key most likely meant: the same name elsewhere, else a similar one, here or elsewhere."""
    section, _, name = key.rpartition(".")
    elsewhere = {key.rpartition(".")[2]: key for key, *_ in settings(root)}
    if name in elsewhere:
        return elsewhere[name]
    if near := get_close_matches(name, owner.model_fields, n=1, cutoff=0.5):
        return f"{section}.{near[0]}" if section else near[0]
    near = get_close_matches(name, elsewhere, n=1)
    return elsewhere[near[0]] if near else None


def _explain_missing(source: str) -> str:
    """Why a string that is neither the short form nor a file is no configuration."""
    allowed = f"allowed: '{SHORT_FORM}' or the path of a .yaml, .yml or .json file"
    if get_close_matches(source.lower(), [SHORT_FORM, "ncz", "nccl"], n=1):
        return f"{source!r} is not a configuration; did you mean '{SHORT_FORM}'? {allowed}"
    return f"{source}: no such file (looked in {os.getcwd()}); {allowed}"


# ------------------------------------------------------------------ inside a DeepSpeed configuration

# Top-level keys that only a DeepSpeed configuration has: enough to tell one from ours.
_DEEPSPEED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "fp16",
    "bf16",
}


def is_deepspeed(document: Mapping[Any, Any]) -> bool:
    """Whether `document` is a DeepSpeed configuration rather than one of ours."""
    return any(key in _DEEPSPEED_KEYS or _means_our_key(key) for key in document)


def find_in_deepspeed(document: Mapping[Any, Any]) -> Any:
    """What a DeepSpeed configuration says about compression: a source for `Config.load`, or None if off.

    That is the value of its top-level key "communication_compression"; null and false mean off.
    Raises `ConfigError` if the key is misspelt or stands anywhere else, where DeepSpeed would
    ignore it and train uncompressed without a sign.
    """
    for path in _paths_of_our_key(document):
        if len(path) > 1:
            raise ConfigError(f"'{DEEPSPEED_KEY}' stands at {'.'.join(path)}; move it to the top level of the file")
        if path[0] != DEEPSPEED_KEY:
            raise ConfigError(f"{path[0]}: unknown key; did you mean '{DEEPSPEED_KEY}'?")
    source = document.get(DEEPSPEED_KEY)
    return None if source is False else source


def _means_our_key(key: object) -> bool:
    """Whether `key` is ours or a misspelling. DeepSpeed's own communication_data_type is neither."""
    letters = re.sub("[^a-z]", "", str(key).lower())
    return SequenceMatcher(None, letters, DEEPSPEED_KEY.replace("_", "")).ratio() > 0.7


def _paths_of_our_key(document: Mapping[Any, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        path = (*prefix, str(key))
        if _means_our_key(key):
            yield path
        elif isinstance(value, Mapping):
            yield from _paths_of_our_key(value, path)
