"""Treatment of each parameter of a model under a configuration, in one step of a training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...core.bypass import by_dtype, by_role, by_size
from ...core.config import Config, Policy
from ...core.training.error_feedback import dtype_of
from ...core.training.policy import ParameterSlice, Policies, Treatment

ROLE = "gradient"


class Row(NamedTuple):
    """One parameter and its treatment.

    Attributes:
        name: name in `named_parameters`.
        shape: shape of the parameter.
        dtype: dtype of the parameter. Its gradient has the same, unless a framework reduces in another.
        numel: number of elements.
        treatment: treatment of its gradient; None if it has no gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    treatment: Treatment | None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """Memory that error feedback takes on every rank, in bytes."""
        if self.treatment is None or self.treatment.bypass or not self.treatment.quantizer.feeds_back:
            return 0
        return self.numel * dtype_of(self.dtype).itemsize


class Match(NamedTuple):
    """Effect of one policy on a model.

    Attributes:
        policy: the policy.
        fits: number of parameters that it matches.
        decides: number of these that no earlier policy matches.
    """

    policy: Policy
    fits: int
    decides: int


def rows(model: nn.Module, config: Config, step: int) -> list[Row]:
    """A row for each parameter of `model`, in the order of `named_parameters`.

    Args:
        step: number of the step, from 0.
    """
    policies = Policies(config)
    found = []
    for name, value in model.named_parameters():
        treatment = _treatment(policies, config, _whole(name, value), value.dtype, step)
        shape = tuple(value.shape)
        found.append(Row(name, shape, value.dtype, value.numel(), treatment if value.requires_grad else None))
    return _with_small_ones_plain(found, config)


def matches(model: nn.Module, config: Config) -> list[Match]:
    """Effect of each policy on the gradients of `model`."""
    parts = [(_whole(name, value), value.dtype) for name, value in model.named_parameters() if value.requires_grad]
    together = Policies(config)
    first = [together.matching(part, dtype, ROLE) for part, dtype in parts]
    found = []
    for at, policy in enumerate(config.policies):
        alone = Policies(config.model_copy(update={"policies": (policy,)}))
        fits = sum(alone.matching(part, dtype, ROLE) is not None for part, dtype in parts)
        found.append(Match(policy, fits, first.count(at)))
    return found


def _whole(name: str, parameter: torch.Tensor) -> ParameterSlice:
    return ParameterSlice(name, parameter.numel(), shape=tuple(parameter.shape))


def _treatment(policies: Policies, config: Config, part: ParameterSlice, dtype: torch.dtype, step: int) -> Treatment:
    if bypass := by_role(ROLE, config) or by_dtype(dtype):
        return Treatment(config.quantizer, bypass, bypass.value)
    return policies.treatment(part, dtype, ROLE, step)


def _with_small_ones_plain(found: list[Row], config: Config) -> list[Row]:
    """Rows in which parameters go plain if all those with the same treatment are too small together."""
    if config.transport.min_bytes == "auto":  # measured when a training starts
        return found
    # Parameters with the same treatment and dtype are reduced together: add up their bytes.
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
