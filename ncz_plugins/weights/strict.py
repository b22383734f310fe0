"""Strict JSON, in indexes of patches and in manifests: it comes from anywhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_SIZE = 1 << 48
Size = Annotated[int, Field(ge=0, lt=MAX_SIZE)]


class Strict(BaseModel):
    """Unknown fields and other types are errors."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
