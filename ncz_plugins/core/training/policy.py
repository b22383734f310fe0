"""Treatment of each part of a tensor: compressed with a certain quantizer, or plain.

A tensor consists of parts, and each part belongs to a named parameter. The first policy that matches a part decides its
treatment; `steps` changes bounds in the course of a training. Weights and activations have defaults of their own, see
`Config.quantizer_of`, which only a policy for their role replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

import torch

from ..bypass import Bypass, by_policy, by_warm_up
from ..config import ROLE_DEFAULTS, Config, Policy, QuantizerConfig, QuantizerOverrides

_MAX_CACHED_PARTS = 100_000  # a limit, as tensors without names may have another size in each call
_UNKNOWN = -1  # stands for the index of a policy that has not been looked up
NO_SIZE = -1  # elements of a tensor that has another size on each rank


class ParameterSlice(NamedTuple):
    """Contiguous elements of one parameter within a flat tensor.

    Attributes:
        name: name of the parameter; None if it has none.
        length: number of elements of the slice.
        start: index of the first of them within the parameter.
        numel: number of elements of the whole parameter. None stands for start + length. 0 marks padding, which is
            treated like the slice before it. NO_SIZE: no policy that asks for a size matches.
        feeds_back: whether error feedback adds and renews the residual. False for a gradient that an earlier step
            computed, because its result may be dropped. Ranks may differ.
        shape: of the whole parameter, the dimension that varies slowest in memory first. None: unknown; no policy that
            asks for a shape matches.
    """

    name: str | None
    length: int
    start: int = 0
    numel: int | None = None
    feeds_back: bool = True
    shape: tuple[int, ...] | None = None

    @property
    def dimensions(self) -> int | None:
        """Number of dimensions of the whole parameter; None: unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def of(self) -> int:
        """Number of elements of the whole parameter."""
        return self.start + self.length if self.numel is None else self.numel


class Treatment(NamedTuple):
    """Decision about one part of a tensor.

    Attributes:
        quantizer: quantizer with the bound of this step.
        bypass: reason to go plain; None if the part is compressed.
        because: what decided, in a few words, such as "policies[0]".
    """

    quantizer: QuantizerConfig
    bypass: Bypass | None
    because: str

    def without_loss(self) -> Treatment:
        """A copy that keeps every bit."""
        return self._replace(quantizer=_lossless(self.quantizer))


class Policies:
    """The policies of a configuration. They use only what all ranks have in common, so all ranks decide alike."""

    def __init__(self, config: Config):
        self._config = config
        self._matching: dict[tuple, int | None] = {}  # results of `matching`
        self._treatments: dict[tuple, Treatment] = {}

    def treatment(
        self, part: ParameterSlice, dtype: torch.dtype, role: str | None, step: int, tightening: float = 1.0
    ) -> Treatment:
        """Treatment of a part.

        Args:
            dtype: dtype of the tensor that is reduced or gathered.
            step: number of the step, from 0.
            tightening: factor on the bound, in addition to that of `steps.bounds`.
        """
        if bypass := by_warm_up(step, self._config):
            return Treatment(self._config.quantizer, bypass, bypass.value)
        key = (self.matching(part, dtype, role), role, self._config.steps.bounds_times(step) * tightening)
        found = self._treatments.get(key)
        if found is None:
            found = self._treatments[key] = self._new_treatment(*key)
        return found

    def matching(self, part: ParameterSlice, dtype: torch.dtype, role: str | None) -> int | None:
        """Index of the first policy that matches, or None."""
        if not self._config.policies:
            return None
        key = (part.name, part.of, part.dimensions, dtype, role)
        found = self._matching.get(key, _UNKNOWN)
        if found == _UNKNOWN:
            if len(self._matching) >= _MAX_CACHED_PARTS:
                self._matching.clear()
            matching = (at for at, policy in enumerate(self._config.policies) if _matches(policy, *key))
            found = self._matching[key] = next(matching, None)
        return found

    def _new_treatment(self, at: int | None, role: str | None, times: float) -> Treatment:
        quantizer, bypass, because = self._config.quantizer_of(role), None, "default"
        if at is not None:
            policy = self._config.policies[at]
            bypass, because = by_policy(policy), f"policies[{at}]"
            # A policy for everything is meant for gradients, unless it keeps every bit.
            is_for_role = policy.role == role and policy.quantizer != QuantizerOverrides()
            if is_for_role or role not in ROLE_DEFAULTS or policy.quantizer.kind == "lossless":
                quantizer = policy.quantizer.applied_to(self._config.quantizer)
        return Treatment(quantizer.times(times), bypass, because)


def named(parts: Sequence[ParameterSlice]) -> str | None:
    """A name for messages about a tensor that consists of `parts`; None if no part has a name."""
    names = list(dict.fromkeys(part.name for part in parts if part.name is not None and part.length))
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] if names else None


@lru_cache
def _lossless(quantizer: QuantizerConfig) -> QuantizerConfig:
    return quantizer.changed(kind="lossless")


def _matches(
    policy: Policy, name: str | None, numel: int, dimensions: int | None, dtype: torch.dtype, role: str | None
) -> bool:
    if policy.name is not None:
        patterns = (policy.name,) if isinstance(policy.name, str) else policy.name
        if name is None or not any(fnmatchcase(name, pattern) for pattern in patterns):
            return False
    if numel == NO_SIZE and (policy.min_elements is not None or policy.max_elements is not None):
        return False
    if policy.min_elements is not None and numel < policy.min_elements:
        return False
    if policy.max_elements is not None and numel > policy.max_elements:
        return False
    if policy.shape is not None and (dimensions is None or (policy.shape == "matrix") != (dimensions >= 2)):
        return False
    if policy.dtype is not None and dtype != getattr(torch, policy.dtype):
        return False
    return policy.role is None or policy.role == role
