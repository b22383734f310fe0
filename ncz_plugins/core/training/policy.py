"""What each part of a tensor gets: compressed, by which quantizer, or not.

A tensor that is reduced consists of parts that belong to named parameters. The first of the configuration's policies
that fits a part says how it is treated; `steps` says what changes in the course of a training. Weights (the role
parameter) keep every bit, unless a policy for that role has a quantizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

import torch

from ..bypass import Bypass, by_policy, by_warm_up
from ..config import Config, Policy, QuantizerConfig, QuantizerOverrides

_MOST_KNOWN = 100_000  # parts; tensors without names may have another size in each call
_UNKNOWN = -1  # in place of the index of a policy


class ParameterSlice(NamedTuple):
    """Neighbouring elements of one parameter, as they lie in a flat tensor.

    Attributes:
        name: of the parameter; None for what has none.
        length: elements.
        start: where in the parameter they begin.
        numel: elements of the whole parameter; None for start + length; 0 for padding, which is treated like what
            lies before it.
        feeds_back: whether error feedback adds and renews the residual. False for a gradient of an earlier step, which
            this step has not computed: what comes out may be dropped. Ranks may differ.
    """

    name: str | None
    length: int
    start: int = 0
    numel: int | None = None
    feeds_back: bool = True

    @property
    def of(self) -> int:
        """Elements of the whole parameter."""
        return self.start + self.length if self.numel is None else self.numel


class Treatment(NamedTuple):
    """What is done with a part.

    Attributes:
        quantizer: with the bound of this step.
        bypass: why it goes plain, if it does.
        because: what decided that, in a few words.
    """

    quantizer: QuantizerConfig
    bypass: Bypass | None
    because: str

    def without_loss(self) -> Treatment:
        """The same, but that every bit is kept."""
        return self._replace(quantizer=_lossless(self.quantizer))

    def settings(self, config: Config) -> Config:
        """The configuration of a call that is treated so, where `config` is in force."""
        if self.quantizer is config.quantizer:  # as by default; to compare or hash it would slow small calls down
            return config
        return _with_quantizer(config, self.quantizer)


class Policies:
    """The treatment of any part in any step. It depends on nothing in which ranks could differ."""

    def __init__(self, config: Config):
        self._config = config
        self._fitting: dict[tuple, int | None] = {}  # what `fitting` found
        self._treatments: dict[tuple, Treatment] = {}

    def treatment(
        self, part: ParameterSlice, dtype: torch.dtype, role: str | None, step: int, tightening: float = 1.0
    ) -> Treatment:
        """What a part gets.

        Args:
            dtype: of the tensor that is reduced or gathered.
            step: counted from 0.
            tightening: what its bound is multiplied by on top of the configuration's schedule.
        """
        if bypass := by_warm_up(step, self._config):
            return Treatment(self._config.quantizer, bypass, bypass.value)
        key = (self.fitting(part, dtype, role), role, self._config.steps.bounds_times(step) * tightening)
        if key not in self._treatments:
            self._treatments[key] = self._made(*key)
        return self._treatments[key]

    def fitting(self, part: ParameterSlice, dtype: torch.dtype, role: str | None) -> int | None:
        """The index of the first policy that fits, or None."""
        if not self._config.policies:
            return None
        key = (part.name, part.of, dtype, role)
        found = self._fitting.get(key, _UNKNOWN)
        if found == _UNKNOWN:
            if len(self._fitting) >= _MOST_KNOWN:
                self._fitting.clear()
            fit = (at for at, policy in enumerate(self._config.policies) if _fits(policy, *key))
            found = self._fitting[key] = next(fit, None)
        return found

    def _made(self, at: int | None, role: str | None, times: float) -> Treatment:
        quantizer, bypass, because, changes = self._config.quantizer, None, "default", False
        if at is not None:
            policy = self._config.policies[at]
            quantizer, because = policy.quantizer.applied_to(quantizer), f"policies[{at}]"
            bypass = by_policy(policy)
            changes = policy.role == "parameter" and policy.quantizer != QuantizerOverrides()
        if role == "parameter" and not changes:  # no later step averages out the error of a weight
            quantizer = _lossless(quantizer)
        return Treatment(quantizer.times(times), bypass, because)


def named(parts: Sequence[ParameterSlice]) -> str | None:
    """What to call a tensor that consists of `parts`, for people; None if none of them has a name."""
    names = list(dict.fromkeys(part.name for part in parts if part.name is not None and part.length))
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] if names else None


@lru_cache
def _lossless(quantizer: QuantizerConfig) -> QuantizerConfig:
    return quantizer.changed(kind="lossless")


@lru_cache
def _with_quantizer(config: Config, quantizer: QuantizerConfig) -> Config:
    return config if config.quantizer == quantizer else config.model_copy(update={"quantizer": quantizer})


def _fits(policy: Policy, name: str | None, numel: int, dtype: torch.dtype, role: str | None) -> bool:
    if policy.name is not None:
        patterns = (policy.name,) if isinstance(policy.name, str) else policy.name
        if name is None or not any(fnmatchcase(name, pattern) for pattern in patterns):
            return False
    if policy.min_elements is not None and numel < policy.min_elements:
        return False
    if policy.max_elements is not None and numel > policy.max_elements:
        return False
    if policy.dtype is not None and dtype != getattr(torch, policy.dtype):
        return False
    return policy.role is None or policy.role == role
