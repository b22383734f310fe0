"""What each parameter of a model gets under a configuration, in one step of a training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...core.bypass import by_dtype, by_role, by_size
from ...core.config import Config, Policy
from ...core.training.policy import ParameterSlice, Policies, Treatment

ROLE = "gradient"


class Row(NamedTuple):
    """One parameter.

    Attributes:
        name: as `named_parameters` has it.
        shape: its sizes.
        dtype: of the parameter, and of its gradient unless a framework reduces it in another.
        numel: elements.
        treatment: of its gradient; None where it has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    treatment: Treatment | None

    @property
    def nbytes(self) -> int:
        """Of the gradient."""
        return self.numel * self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """What error feedback takes on every rank."""
        if self.treatment is None or self.treatment.bypass or not self.treatment.quantizer.feeds_back:
            return 0
        return self.numel * torch.promote_types(self.dtype, torch.float32).itemsize


class Match(NamedTuple):
    """What a policy does with a model.

    Attributes:
        policy: itself.
        fits: parameters that have what it asks for.
        decides: those of them that no earlier policy takes.
    """

    policy: Policy
    fits: int
    decides: int


def rows(model: nn.Module, config: Config, step: int) -> list[Row]:
    """What every parameter of `model` gets in a step, counted from 0, in the order of `named_parameters`."""
    policies = Policies(config)
    found = []
    for name, value in model.named_parameters():
        treatment = _treatment(policies, config, ParameterSlice(name, value.numel()), value.dtype, step)
        shape = tuple(value.shape)
        found.append(Row(name, shape, value.dtype, value.numel(), treatment if value.requires_grad else None))
    return _with_what_is_too_small(found, config)


def matches(model: nn.Module, config: Config) -> list[Match]:
    """What each policy does with the gradients of `model`."""
    parts = [
        (ParameterSlice(name, value.numel()), value.dtype)
        for name, value in model.named_parameters()
        if value.requires_grad
    ]
    together = Policies(config)
    first = [together.matching(part, dtype, ROLE) for part, dtype in parts]
    found = []
    for at, policy in enumerate(config.policies):
        alone = Policies(config.model_copy(update={"policies": (policy,)}))
        fits = sum(alone.matching(part, dtype, ROLE) is not None for part, dtype in parts)
        found.append(Match(policy, fits, first.count(at)))
    return found


def _treatment(policies: Policies, config: Config, part: ParameterSlice, dtype: torch.dtype, step: int) -> Treatment:
    if bypass := by_role(ROLE, config) or by_dtype(dtype):
        return Treatment(config.quantizer, bypass, bypass.value)
    return policies.treatment(part, dtype, ROLE, step)


def _with_what_is_too_small(found: list[Row], config: Config) -> list[Row]:
    """Parameters that are treated alike are reduced together; what is too small even so goes plain."""
    if config.transport.min_bytes == "auto":  # measured when a training starts
        return found
    together: dict[tuple, int] = {}
    for row in found:
        together[row.treatment, row.dtype] = together.get((row.treatment, row.dtype), 0) + row.nbytes
    changed = []
    for row in found:
        bypass = by_size(together[row.treatment, row.dtype], config)
        if bypass and row.treatment and not row.treatment.bypass:
            because = f"{row.treatment.because}, {bypass.value}"
            row = row._replace(treatment=row.treatment._replace(bypass=bypass, because=because))
        changed.append(row)
    return changed
