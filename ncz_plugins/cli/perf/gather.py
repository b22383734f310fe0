"""Exchange of values between all ranks. Values travel as JSON, because unpickling would run code of other ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import NczError

MOST_BYTES = 64 << 20  # limit for one rank; a recording of a long call has a few megabytes


def gathered(value: Any) -> list[Any]:
    """Values of all ranks, in rank order. A collective: all ranks must call it.

    Args:
        value: this rank's value, of JSON types. Tuples are returned as lists.

    Raises NczError on all ranks if one of them sends more than MOST_BYTES.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [size.item() for size in _from_all(torch.tensor([text.numel()], dtype=torch.int64, device="cpu"))]
    if not 0 < min(sizes) <= max(sizes) <= MOST_BYTES:  # checked before memory is allocated
        raise NczError(f"ranks send {sizes} bytes; allowed: 1 to {MOST_BYTES} bytes each")
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    mine[: text.numel()] = text
    return [json.loads(text[:size].numpy().tobytes()) for text, size in zip(_from_all(mine), sizes)]


def _from_all(tensor: Tensor) -> list[Tensor]:
    """Tensors of all ranks, in rank order; all must have the same size."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors
