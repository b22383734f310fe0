"""Lossless compressors around an all-gather of bytes. An all-reduce gathers and adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ncz_plugins.cli.perf.contenders.collectives import all_gather_single
from ncz_plugins.cli.perf.contenders.exchange import Contender, Context, Exchange
from ncz_plugins.core.errors import NczError

from .needs import Needs

_MAX_OVERHEAD_BYTES = 4096  # that a compressor may add to a small tensor


class Gather(Exchange):
    """Exchange that compresses floats, gathers sizes and bytes, and decompresses those of all ranks.

    Args:
        compress: takes a float32 array, [n], and returns bytes.
        decompress: takes these bytes, and returns the bytes of the array.
    """

    def __init__(self, context: Context, compress: Callable, decompress: Callable):
        super().__init__(context)
        self._compress = compress
        self._decompress = decompress

    def run(self) -> Tensor:
        tensor = self.tensor
        if self.context.collective == "all_gather":
            whole = self.context.buffer("whole", tensor.numel() * self.context.world_size, tensor)
            for part, floats in zip(whole.numpy().reshape(-1, tensor.numel()), self._gathered(tensor)):
                part[:] = floats
            return whole
        total = self.context.buffer("whole", tensor.numel(), tensor).zero_()
        for floats in self._gathered(tensor):
            np.add(total.numpy(), floats, out=total.numpy())
        return total

    def _gathered(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """Floats of all ranks, in rank order. Data are padded to the same size on all ranks, as gloo requires."""
        group, ranks = self.context.group, self.context.world_size
        data = self._compress(tensor.numpy())
        sizes = torch.empty(ranks, dtype=torch.int64, device="cpu")
        all_gather_single(sizes, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), group=group)
        most = int(sizes.max())
        if (
            not 0 < int(sizes.min()) <= most <= 2 * tensor.nbytes + _MAX_OVERHEAD_BYTES
        ):  # checked before memory is allocated
            raise NczError(f"ranks announced {sizes.tolist()} bytes for tensors of {tensor.nbytes} each")
        sent = self.context.buffer("sent", most, tensor, torch.uint8)
        sent.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        received = self.context.buffer("received", most * ranks, tensor, torch.uint8)
        all_gather_single(received, sent, group=group)
        for rank, size in enumerate(sizes.tolist()):
            if rank == self.context.rank:
                yield tensor.numpy()
            else:
                data = received[rank * most : rank * most + size].numpy()
                yield np.frombuffer(self._decompress(data), np.float32)


def _zstd(context: Context) -> Gather:
    import zstandard

    return Gather(context, zstandard.ZstdCompressor().compress, zstandard.ZstdDecompressor().decompress)


def _lz4(context: Context) -> Gather:
    import lz4.frame

    return Gather(context, lz4.frame.compress, lz4.frame.decompress)


_COLLECTIVES = frozenset({"all_reduce", "all_gather"})

CONTENDERS = (
    Contender("zstd", "zstd level 3 around all-gather: lossless", _zstd, _COLLECTIVES, Needs("zstandard", "peers")),
    Contender("lz4", "lz4 level 0 around all-gather: lossless", _lz4, _COLLECTIVES, Needs("lz4", "peers")),
)
