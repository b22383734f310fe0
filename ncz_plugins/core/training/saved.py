"""What the saved state of a training must be like. It comes from a file, which may be anybody's."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from ..bypass import Bypass
from ..config import first_problem
from ..errors import ConfigError

_Count = Annotated[int, Field(ge=0)]


def _residual(kept: Tensor) -> Tensor:
    if kept.dim() != 1 or kept.dtype not in (torch.float32, torch.float64) or kept.layout != torch.strided:
        raise ValueError("dense, one-dimensional and of float32 or float64 is what it must be")
    return kept


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class _Guard(_Section):
    tightening: Annotated[float, Field(gt=0, le=1)]
    calls: Annotated[int, Field(ge=1)]


def _hopeless(each: list) -> list:
    reason, *numbers = each
    if reason not in [bypass.value for bypass in Bypass] or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a reason and two counts are what it must hold")
    return each


class _Group(_Section):
    calls: _Count
    patience: list[dict[str, Annotated[list, Field(min_length=3, max_length=3), AfterValidator(_hopeless)]]]
    guard: _Guard


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    rank: _Count
    world_size: Annotated[int, Field(ge=1)]
    step: _Count
    residuals: dict[str, Annotated[Tensor, AfterValidator(_residual)]]
    groups: dict[Annotated[str, StringConstraints(pattern=r"^\d+( \d+)*$")], _Group]


def require_saved(state: dict[str, Any]) -> None:
    """Raise ConfigError, which names what is wrong, unless `Training.state_dict` can have returned this."""
    try:
        _Saved.model_validate(dict(state))
    except ValidationError as error:
        raise ConfigError(
            f"state of ncz_plugins: {first_problem(error)}; pass what Training.state_dict returns"
        ) from None
