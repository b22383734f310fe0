"""8-bit quantization of hivemind around an all-reduce like its own, over the process group instead of its network.

Each rank owns a segment. It receives the quantized values of all other ranks, and averages them with its own exact
values. To each rank it returns the quantized difference between the average and what that rank sent; the rank adds the
difference to its exact values. So results differ between ranks by what quantization loses. As in hivemind, segments
are sent in parts, so that coding and sending overlap. Unlike in hivemind, a part never spans two segments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ncz_plugins.cli.perf.contenders.exchange import Contender, Context, Exchange

from .needs import Needs

_PART_ELEMENTS = 1 << 19  # as in hivemind: 512 KiB of 8-bit codes
_CODEBOOK_BYTES = 256 * 4
_VALUES_TAG, _DIFFERENCES_TAG = 1, 2


class Butterfly(Exchange):
    """Average over ranks, by a butterfly all-reduce.

    Args:
        quantization: name of a class in hivemind.compression that makes a codebook of 256 values for each part.
    """

    summed = "avg"

    def __init__(self, context: Context, quantization: str):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # it uses torch.jit.script
            from hivemind import compression

        super().__init__(context)
        self._quantize = getattr(compression, quantization)().quantize
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]

    def run(self) -> Tensor:
        tensor = self.tensor
        own = list(self._parts(tensor.numel(), self.context.rank))
        foreign = [(rank, part) for rank in self._others for part in self._parts(tensor.numel(), rank)]
        # Start to receive, then send the parts of all other segments to their owners.
        values = [[self._receive(rank, _VALUES_TAG, part) for rank in self._others] for part in own]
        differences = [self._receive(rank, _DIFFERENCES_TAG, part) for rank, part in foreign]
        result = self.context.buffer("whole", tensor.numel(), tensor)
        sending = [self._send(rank, _VALUES_TAG, tensor[part]) for rank, part in foreign]
        # Average the own segment, and return to each rank what it has to add.
        for part, messages in zip(own, values):
            received = [_values(*message) for message in messages]
            average = result[part].copy_(tensor[part])
            for addend in received:
                average += addend
            average /= self.context.world_size
            for rank, value in zip(self._others, received):
                sending.append(self._send(rank, _DIFFERENCES_TAG, average - value))
        # Add the differences that the other owners return.
        for (_, part), message in zip(foreign, differences):
            torch.add(tensor[part], _values(*message), out=result[part])
        for work, _ in sending:
            work.wait()
        return result

    def _parts(self, numel: int, rank: int) -> Iterator[slice]:
        """Parts of the segment of a rank."""
        first, end = (numel * i // self.context.world_size for i in (rank, rank + 1))
        for start in range(first, end, _PART_ELEMENTS):
            yield slice(start, min(start + _PART_ELEMENTS, end))

    def _receive(self, rank: int, tag: int, part: slice) -> tuple[dist.Work, Tensor]:
        message = torch.empty(_CODEBOOK_BYTES + part.stop - part.start, dtype=torch.uint8, device="cpu")
        return self.context.group.recv([message], rank, tag), message

    def _send(self, rank: int, tag: int, values: Tensor) -> tuple[dist.Work, Tensor]:
        codes, codebook = self._quantize(values)
        message = torch.from_numpy(np.concatenate([codebook.view(np.uint8), codes]))
        return self.context.group.send([message], rank, tag), message


def _values(work: dist.Work, message: Tensor) -> Tensor:
    """Values of a received message. Replaces hivemind's `extract`, which fails with NumPy 2.4."""
    work.wait()
    codebook = message[:_CODEBOOK_BYTES].numpy().view(np.float32)
    return torch.from_numpy(codebook.take(message[_CODEBOOK_BYTES:].numpy()))


def _contender(name: str, quantization: str, how: str) -> Contender:
    description = f"hivemind's {quantization}: 8 bits, {how}, parts of 2 MiB, each rank averages a segment"
    start = partial(Butterfly, quantization=quantization)
    return Contender(name, description, start, frozenset({"all_reduce"}), Needs("hivemind", "peers"))


CONTENDERS = (
    _contender("hivemind", "Uniform8BitQuantization", "cut off at three standard deviations"),
    _contender("hivemind-quantile", "Quantile8BitQuantization", "as fine as values are frequent"),
)
