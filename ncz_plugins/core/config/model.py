"""`Config`: all settings in one immutable object, and how it is loaded. Nothing here imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from ..errors import ConfigError
from .deepspeed_file import DEEPSPEED_KEY, is_deepspeed
from .documents import read_document
from .fields import (
    GPU_FIXED_RATE_MIB_PER_GBPS,
    GPU_MIB_PER_GBPS,
    MIN_BYTES,
    MOST_SMALL_RANKS,
    TWO_RANKS_MIB_PER_GBPS,
    TWO_RANKS_MIN_BYTES,
    Allowed,
    Role,
    format_size,
    min_bytes_for,
)
from .paths import escaped, expanded_path
from .presets import NAMES, PRESETS, SHORT_FORM, is_preset, preset
from .section import Section, settings_of
from .sections import (
    CoderCosts,
    EntropyConfig,
    GuardConfig,
    Policy,
    QuantizerConfig,
    QuantizerOverrides,
    StatisticsConfig,
    StepsConfig,
    TransportConfig,
)

# What replaces settings of `quantizer` for tensors of a role, unless a policy for the role has a quantizer of its own.
# Later steps don't average out the error of a weight. docs/results/convergence.md says what that of activations costs.
ROLE_DEFAULTS: dict[str, QuantizerOverrides] = {
    "parameter": QuantizerOverrides(kind="lossless"),
    "activation": QuantizerOverrides(
        kind="error_bound", mode="rms", value=0.1, block=128, error_feedback=False, rotation=False
    ),
}


class Config(Section):
    """All settings, immutable and hashable. `Config()` has the defaults; `Config.load` reads every other form.

    Raises ConfigError for invalid, unknown or mistyped settings.
    """

    quantizer: QuantizerConfig = QuantizerConfig()
    entropy: EntropyConfig = EntropyConfig()
    transport: TransportConfig = TransportConfig()
    policies: Annotated[
        tuple[Policy, ...], Allowed(f"a list of mappings with the keys {', '.join(Policy.model_fields)}")
    ] = Field(
        default=(),
        description="Other settings for some parameters. The first policy that matches counts.",
    )
    steps: StepsConfig = StepsConfig()
    guard: GuardConfig = GuardConfig()
    roles: Annotated[
        tuple[Role, ...],
        Field(min_length=1, json_schema_extra={"uniqueItems": True}),
        Allowed(f"a list of {', '.join(get_args(Role))}, or of some of them"),
    ] = Field(
        default=("gradient",),
        description="What is compressed. Unless a policy for the role has a quantizer, parameters stay exact, and "
        f"activations have {ROLE_DEFAULTS['activation'].applied_to(QuantizerConfig()).describe()}.",
    )
    statistics: StatisticsConfig = StatisticsConfig()
    # Whether tuning chose `transport.schedule`, which then holds for tensors in host memory alone. A schedule that
    # users name holds for all tensors.
    _schedule_is_tuned: bool = PrivateAttr(default=False)

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

    @model_validator(mode="after")
    def _no_checksums_without_frames(self) -> Config:
        for where, quantizer in self._quantizers():
            if self.entropy.checksum and quantizer.bits is not None:
                raise ConfigError(
                    f"entropy.checksum: true, and {where} {quantizer.value:g} with mode bits: a fixed rate sends no "
                    "frames that could carry a checksum. Set one of them otherwise"
                )
        return self

    @model_validator(mode="after")
    def _no_rotation_at_fixed_rates(self) -> Config:
        for where, quantizer in self._quantizers():
            if quantizer.rotates and quantizer.bits is not None:
                raise ConfigError(
                    f"rotation: true, and {where} {quantizer.value:g} with mode bits: matrices are not "
                    "turned at a fixed rate. Set another mode, or rotation to false"
                )
        return self

    def quantizer_of(self, role: str | None) -> QuantizerConfig:
        """Quantizer of tensors of a role where no policy has one for them. Kind lossless is that of all roles."""
        if role not in ROLE_DEFAULTS or self.quantizer.kind == "lossless":
            return self.quantizer
        return ROLE_DEFAULTS[role].applied_to(self.quantizer)

    @property
    def rotates(self) -> bool:
        """Whether any sums are coded in the singular vectors of their momentum."""
        return any(quantizer.rotates for _, quantizer in self._quantizers())

    def _quantizers(self) -> Iterator[tuple[str, QuantizerConfig]]:
        """All quantizers that tensors may get, each with the key of its value."""
        yield "quantizer.value", self.quantizer
        if "activation" in self.roles:
            yield "activations with a bound of", self.quantizer_of("activation")
        for at, policy in enumerate(self.policies):
            try:
                yield f"policies[{at}].quantizer.value", policy.quantizer.applied_to(self.quantizer)
            except ConfigError as error:
                raise ConfigError(f"policies[{at}].quantizer, with the rest of quantizer: {error}") from None

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike | None = None) -> Config:
        """Load a configuration.

        Args:
            source: None or "ncclz" for the defaults; the name of a preset, such as "ncclz:small"; a mapping; the path
                of a .yaml, .yml or .json file; or a `Config`, which is returned unchanged. The key "$schema", used by
                editors, is ignored.

        Raises ConfigError, naming the file if there is one, and every problem in it.
        """
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        if isinstance(source, str) and is_preset(source):
            return cls(**preset(source))
        if isinstance(source, Mapping):
            return _from_mapping(source)
        if isinstance(source, (str, os.PathLike)):
            path = os.fsdecode(source)
            if not os.path.exists(path):  # a file with ~ or $ in its name is taken literally
                path = expanded_path(path)
            if isinstance(source, str) and not os.path.exists(path):
                raise ConfigError(_explain_missing(path))
            return cls.from_document(read_document(path), path)
        raise ConfigError(
            f"{source!r} ({type(source).__name__}) is not a configuration; "
            f"allowed: {NAMES}, a mapping, or the path of a .yaml, .yml or .json file"
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any], path: str) -> Config:
        """The configuration in `document`, the contents of the file `path`. Raises ConfigError, naming the file."""
        try:
            return _from_mapping(document)._seen_from(os.path.dirname(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def with_transport(self, **values: Any) -> Config:
        """A copy with these settings of `transport` replaced."""
        made = type(self)(**dict(self) | {"transport": self.transport.model_dump() | values})
        made._schedule_is_tuned = self._schedule_is_tuned and "schedule" not in values
        return made

    def for_gpus(self) -> Config:
        """These settings for tensors on GPUs: a schedule that tuning chose, for host memory, is `auto` again."""
        return self.with_transport(schedule="auto") if self._schedule_is_tuned else self

    @property
    def needs_measuring(self) -> bool:
        """Whether sizes are `auto`, and so measured when a communicator opens."""
        return "auto" in (self.transport.frame_bytes, self.transport.min_bytes)

    @property
    def leaves_link_open(self) -> bool:
        """Whether the speed of the link must be measured: it is not given, and not measured with sizes of `auto`."""
        transport = self.transport
        return transport.link_gbps is None and transport.min_bytes != "never" and not self.needs_measuring

    def min_bytes_in_effect(
        self, on_gpu: bool = False, ranks: int | None = None, around_ring: bool = True
    ) -> int | str:
        """`transport.min_bytes`, or if it is null the value that follows from `transport.link_gbps`; bytes or "never".

        Args:
            on_gpu: whether tensors are on a GPU.
            ranks: number of ranks; None: more than two, or unknown.
            around_ring: whether an uncompressed call passes all ranks one after another, if there are many.
        """
        if self.transport.min_bytes is not None:
            return self.transport.min_bytes
        link_gbps = self.transport.link_gbps
        if on_gpu:
            at_fixed_rate = self.quantizer.bits is not None
            return min_bytes_for(link_gbps, GPU_FIXED_RATE_MIB_PER_GBPS if at_fixed_rate else GPU_MIB_PER_GBPS)
        if around_ring and ranks is not None and ranks > MOST_SMALL_RANKS:
            return MIN_BYTES
        if ranks == 2 and not self.transport.has_fast_link:
            return min_bytes_for(link_gbps, TWO_RANKS_MIB_PER_GBPS, TWO_RANKS_MIN_BYTES)
        return min_bytes_for(link_gbps)

    def resolved(
        self,
        *,
        schedule: str = "auto",
        frame_bytes: int | None = None,
        min_bytes: int | str | None = None,
        link_gbps: float | None = None,
        costs: CoderCosts | None = None,
    ) -> Config:
        """A copy in which settings left open (`auto` or null) have these values. Names no tuning file.

        Args:
            schedule: replaces `auto` for tensors in host memory: see `for_gpus`.
            frame_bytes: replaces `auto`; None for the default, which differs on GPUs.
            min_bytes: replaces `auto` and null. None: `auto` becomes what follows from the link, null stays null, which
                means another size on GPUs.
            link_gbps: replaces null.
            costs: replaces null.
        """
        if min_bytes is None and self.transport.min_bytes == "auto":
            min_bytes = min_bytes_for(self.transport.link_gbps or link_gbps)
        given = {"schedule": schedule, "min_bytes": min_bytes, "link_gbps": link_gbps}
        taken = {key: value for key, value in given.items() if getattr(self.transport, key) in ("auto", None)}
        if self.transport.frame_bytes == "auto":  # null stays: it means different sizes on CPUs and GPUs
            taken["frame_bytes"] = frame_bytes
        entropy = self.entropy.model_copy(update={"costs": self.entropy.costs or costs})
        made = self.with_transport(**taken, tuning=None).model_copy(update={"entropy": entropy})
        made._schedule_is_tuned = self._schedule_is_tuned or taken.get("schedule", "auto") != "auto"
        return made

    def canonical(self) -> str:
        """Compact JSON with sorted keys. Ranks compare this text: equal text means equal settings."""
        settings = self.model_dump(mode="json")
        if self._schedule_is_tuned:  # on GPUs it differs from one that a user named
            settings["transport"]["schedule"] += ", as tuned"
        return json.dumps(settings, sort_keys=True, separators=(",", ":"))

    def describe(self) -> str:
        """The settings in one short line."""
        frames = self.transport.frame_bytes
        frames = "" if frames is None else f", frames {frames if frames == 'auto' else format_size(frames)}"
        predictor = "" if self.entropy.predictor == "auto" else f", predictor {self.entropy.predictor}"
        checksum = ", checksums" if self.entropy.checksum else ""
        its_own = self.quantizer_of("activation")
        differs = "activation" in self.roles and its_own != self.quantizer
        activations = f" (activations: {its_own.describe()})" if differs else ""
        return (
            f"{self.quantizer.describe()}, coder {self.entropy.coder}{predictor}{checksum}, "
            f"schedule {self.transport.schedule}{frames}, roles {'+'.join(self.roles)}{activations}"
            + (f", {len(self.policies)} policies" if self.policies else "")
            + (f", {self.steps.warmup} steps of warm-up" if self.steps.warmup else "")
            + (", a schedule of bounds" if self.steps.bounds else "")
            + (f", verified every {self.guard.every} steps" if self.guard.every else "")
            + (", min_bytes never: nothing is compressed" if self.transport.min_bytes == "never" else "")
        )

    def _seen_from(self, folder: str) -> Config:
        """A copy whose relative paths start at `folder`."""
        tuning = self.transport.tuning
        if tuning is None or os.path.isabs(expanded_path(tuning)):
            return self
        return self.with_transport(tuning=os.path.join(escaped(folder), tuning))


def _from_mapping(document: Mapping[str, Any]) -> Config:
    if is_deepspeed(document):
        raise ConfigError(
            f"this is a DeepSpeed configuration; allowed: a configuration of ncz_plugins, such as the value of its key "
            f"'{DEEPSPEED_KEY}'"
        )
    return Config(**{key: value for key, value in _with_text_keys(document).items() if key != "$schema"})


def _with_text_keys(document: Mapping[Any, Any]) -> dict[str, Any]:
    """`document` with all keys as text. YAML allows any key (`on` is True); as text it is reported as unknown."""
    return {str(k): _with_text_keys(v) if isinstance(v, Mapping) else v for k, v in document.items()}


def _explain_missing(source: str) -> str:
    """Error message for a string that names neither a preset nor a file."""
    allowed = f"allowed: {NAMES}, or the path of a .yaml, .yml or .json file"
    # Misspelt, or a preset without what its name begins with.
    meant = [SHORT_FORM] if get_close_matches(source.lower(), [SHORT_FORM, "ncz", "nccl"], n=1) else []
    meant += [f"{SHORT_FORM}:{each}" for each in PRESETS if each == source.lower()]
    if meant:
        return f"{source!r} is not a configuration; did you mean '{meant[0]}'? {allowed}"
    return f"{source}: no such file (looked in {os.getcwd()}); {allowed}"


# ------------------------------------------------------------------ for documentation and editors


def settings(of_elements: bool = False) -> Iterator[tuple[str, Any, str, str]]:
    """(dotted key, default, allowed values, description) of every setting of `Config`, in order.

    Args:
        of_elements: whether a list is followed by the settings of its elements, such as "policies[].name".
    """
    return settings_of(Config, of_elements=of_elements)


def json_schema() -> dict[str, Any]:
    """JSON Schema of configuration files, for editors."""
    schema = Config.model_json_schema()
    schema |= {"title": "Configuration of ncz_plugins", "description": "Every key may be left out."}
    schema["properties"] = {"$schema": {"type": "string", "description": "For editors."}} | schema["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
