"""PLANES frames of which the chunks lie in any order."""

from __future__ import annotations

import torch

from ncz_plugins.kernels import lossless
from ncz_plugins.kernels.format import CHUNK, HEADER, HEADER_BYTES, PLANES_TILE, Coder, chunks_of, tiles_of

SPLIT_HEAD = lossless._HEAD.size


def in_order(frame: torch.Tensor) -> torch.Tensor:
    """The same frame with its chunks in order, as the reference writes it, and so the frames in a SPLIT frame.

    Any other frame as it is.
    """
    if frame.numel() > HEADER_BYTES and frame[5] == Coder.SPLIT:
        parts, rest = [frame[:SPLIT_HEAD]], frame[SPLIT_HEAD:]
        while rest.numel():
            size = HEADER_BYTES + HEADER.unpack(rest[:HEADER_BYTES].numpy().tobytes())[6]
            parts, rest = [*parts, in_order(rest[:size])], rest[size:]
        return torch.cat(parts)
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
