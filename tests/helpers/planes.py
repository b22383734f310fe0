"""PLANES frames of which the chunks lie in any order."""

from __future__ import annotations

import torch

from ncz_plugins.kernels.format import CHUNK, HEADER, HEADER_BYTES, PLANES_TILE, Coder, chunks_of, tiles_of


def in_order(frame: torch.Tensor) -> torch.Tensor:
    """The same frame with its chunks in order, as the reference writes it; any other frame as it is."""
    if frame.numel() <= HEADER_BYTES or frame[5] != Coder.PLANES:
        return frame
    header = HEADER.unpack(frame[:HEADER_BYTES].numpy().tobytes())
    count = header[5]
    words = frame[HEADER_BYTES:].clone().view(torch.int32)
    begins, table, data = words.tensor_split([chunks_of(count), chunks_of(count) + tiles_of(count)])
    sizes = [int(part.bitwise_and(0xFFFF).sum()) for part in table.split(CHUNK // PLANES_TILE)]
    chunks = [data[begin : begin + size] for begin, size in zip(begins.tolist(), sizes)]
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    new = torch.cat([ends - torch.tensor(sizes, dtype=torch.int32), table, *chunks])
    return torch.cat([frame[:HEADER_BYTES], new.view(torch.uint8)])
