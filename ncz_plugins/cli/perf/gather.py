"""What every rank tells all others: as JSON, since unpickling runs what another rank sends."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import NczError

MOST_BYTES = 64 << 20  # of one rank: a recording of a long call has some megabytes


def gathered(value: Any) -> list[Any]:
    """The `value` of every rank, of JSON types, in rank order. All ranks must call this.

    Tuples come back as lists. Raises NczError on all ranks if one of them tells more than MOST_BYTES.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [size.item() for size in _from_all(torch.tensor([text.numel()], dtype=torch.int64, device="cpu"))]
    if not 0 < min(sizes) <= max(sizes) <= MOST_BYTES:  # before memory is taken
        raise NczError(f"ranks tell {sizes} bytes; from 1 to {MOST_BYTES} are possible")
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    mine[: text.numel()] = text
    return [json.loads(text[:size].numpy().tobytes()) for text, size in zip(_from_all(mine), sizes)]


def _from_all(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, of the same size, in rank order."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors
