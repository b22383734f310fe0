"""Validation of the saved state of a training, which comes from a file and may be damaged or foreign."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from torch import Tensor

from ..config import first_problem
from ..errors import ConfigError

_RESIDUAL_DTYPES = torch.bfloat16, torch.float32, torch.float64  # float32: of earlier versions
_Count = Annotated[int, Field(ge=0)]


def _residual(kept: Tensor) -> Tensor:
    if kept.dim() != 1 or kept.dtype not in _RESIDUAL_DTYPES or kept.layout != torch.strided:
        raise ValueError("must be a dense tensor, one-dimensional, bfloat16, float32 or float64")
    return kept


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class _Guard(_Section):
    tightening: Annotated[float, Field(gt=0, le=1)]
    calls: Annotated[int, Field(ge=1)]


class _Group(_Section):
    calls: _Count
    guard: _Guard


def _basis(saved: tuple[Tensor, int, Tensor]) -> tuple[Tensor, int, Tensor]:
    entries, _, worth = saved
    side = entries.shape[:1]
    if (entries.dtype, entries.shape) != (torch.int16, 2 * side) or (worth.dtype, worth.shape) != (torch.float32, side):
        raise ValueError("must be a square basis, int16, an exponent, and what directions are worth, float32")
    return saved


class _Matrix(_Section):
    shape: tuple[_Count, _Count]
    owner: _Count
    sums: _Count
    basis: Annotated[tuple[Tensor, int, Tensor], AfterValidator(_basis)] | None
    momentum: Tensor | None

    @model_validator(mode="after")
    def _fit(self) -> _Matrix:
        fits = self.basis is None or len(self.basis[0]) == min(self.shape)
        if not fits or (self.momentum is not None and self.momentum.shape != (math.prod(self.shape),)):
            raise ValueError("basis and momentum must have the sizes of the matrix")
        return self


class _OfRank(_Section):
    residuals: dict[str, Annotated[Tensor, AfterValidator(_residual)]]
    groups: dict[Annotated[str, StringConstraints(pattern=r"^\d+( \d+)*$")], _Group]
    rotations: dict[str, _Matrix] = {}


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    world_size: Annotated[int, Field(ge=1)]
    step: _Count
    tightening: Annotated[float, Field(gt=0, le=1)]
    ranks: dict[_Count, _OfRank]


def key_of(rank: int) -> str:
    """The key of the part of a state that differs between ranks."""
    return f"rank {rank}"


def require_saved(state: Mapping[str, Any]) -> dict[int, dict]:
    """The parts of a state by rank: one part, or several if the files of several ranks were merged.

    Raises ConfigError, naming the problem, for anything that `Training.state_dict` can't have returned.
    """
    keys = {int(found[1]): key for key in state if (found := re.fullmatch(r"rank (\d+)", str(key)))}
    if not keys:
        raise ConfigError('state of ncz_plugins: has no key "rank 0", nor that of another rank: a part is missing')
    try:
        # Each part is the only element of a tuple. Anything else fails the validation.
        found = {rank: state[key] for rank, key in keys.items()}
        parts = {rank: each[0] if isinstance(each, tuple) and len(each) == 1 else each for rank, each in found.items()}
        _Saved.model_validate({**state, "ranks": parts})
    except ValidationError as error:
        raise ConfigError(
            f"state of ncz_plugins: {first_problem(error)}; pass what Training.state_dict returns"
        ) from None
    return parts
