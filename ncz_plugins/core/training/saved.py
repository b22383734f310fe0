"""What the saved state of a training must be like. It comes from a file, which may be anybody's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

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


class _Group(_Section):
    calls: _Count
    guard: _Guard


class _OfRank(_Section):
    residuals: dict[str, Annotated[Tensor, AfterValidator(_residual)]]
    groups: dict[Annotated[str, StringConstraints(pattern=r"^\d+( \d+)*$")], _Group]


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    world_size: Annotated[int, Field(ge=1)]
    step: _Count
    tightening: Annotated[float, Field(gt=0, le=1)]
    ranks: dict[_Count, _OfRank]


def key_of(rank: int) -> str:
    """Under which key a state has what differs between ranks."""
    return f"rank {rank}"


def require_saved(state: Mapping[str, Any]) -> dict[int, dict]:
    """What a state has of ranks, by rank: of one, unless files of several were joined.

    Raises ConfigError, which names what is wrong, unless `Training.state_dict` can have returned this.
    """
    keys = {int(found[1]): key for key in state if (found := re.fullmatch(r"rank (\d+)", str(key)))}
    if not keys:
        raise ConfigError('state of ncz_plugins: it has no key "rank 0", or that of another rank: a part is missing')
    try:
        parts = {rank: _only(state[key]) for rank, key in keys.items()}
        _Saved.model_validate({**state, "ranks": parts})
    except ValidationError as error:
        raise ConfigError(
            f"state of ncz_plugins: {first_problem(error)}; pass what Training.state_dict returns"
        ) from None
    return parts


def _only(values: object) -> object:
    """The only element of a tuple. Something else is returned as it is, for the check of what it holds to refuse it."""
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
