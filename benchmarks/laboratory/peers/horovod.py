"""Horovod as its users call it: in place if possible, with or without its own compression."""

from __future__ import annotations

import os
from functools import partial

from torch import Tensor

from ncz_plugins.cli.perf.contenders.exchange import Contender, Context, Exchange
from ncz_plugins.core.errors import UnsupportedError

from .needs import Needs


class Horovod(Exchange):
    """Exchange by one call of Horovod over all ranks, which must have been started as by horovodrun.

    Args:
        compression: name of a class in horovod.torch.Compression. Ignored by all_gather and broadcast.
    """

    def __init__(self, context: Context, compression: str = "none"):
        import horovod.torch as hvd

        super().__init__(context)
        if not hvd.is_initialized():
            hvd.init()
        if (hvd.size(), hvd.rank()) != (context.world_size, context.rank):
            raise UnsupportedError(
                f"Horovod says that this is rank {hvd.rank()} of {hvd.size()}, and torch.distributed that it is rank "
                f"{context.rank} of {context.world_size}: start the ranks with horovodrun, or omit the launcher"
            )
        self._hvd = hvd
        self._compression = getattr(hvd.Compression, compression)
        self._collective = getattr(self, f"_{context.collective}")

    def load(self, tensor: Tensor) -> None:
        uncompressed = self._compression is self._hvd.Compression.none
        in_place = self.context.collective in ("all_reduce", "broadcast") and uncompressed
        self.tensor = self.context.buffer("whole", tensor.numel(), tensor).copy_(tensor) if in_place else tensor

    def run(self) -> Tensor:
        name = f"{self.context.collective} {self._compression.__name__} {self.tensor.numel()}"
        return self._collective(self.tensor, name)

    def _all_reduce(self, tensor: Tensor, name: str) -> Tensor:
        """Same calls as in Horovod's DistributedOptimizer."""
        compressed, original = self._compression.compress(tensor)
        summed = self._hvd.allreduce_(compressed, op=self._hvd.Sum, name=name)
        return self._compression.decompress(summed, original)

    def _reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        return self._hvd.reducescatter(tensor, op=self._hvd.Sum, name=name, compression=self._compression)

    def _all_gather(self, tensor: Tensor, name: str) -> Tensor:
        return self._hvd.allgather(tensor, name=name)

    def _broadcast(self, tensor: Tensor, name: str) -> Tensor:
        return self._hvd.broadcast_(tensor, 0, name=name)

    def _all_to_all(self, tensor: Tensor, name: str) -> Tensor:
        return self._hvd.alltoall(tensor, name=name)


def _contender(name: str, description: str, compression: str, collectives: frozenset[str]) -> Contender:
    start = partial(Horovod, compression=compression)
    return Contender(name, description, start, collectives, _missing)


def _missing() -> str | None:
    """The reason why Horovod can't run; None if it can. The laboratory's ranks have the variables of both launchers."""
    if "RANK" in os.environ and "HOROVOD_RANK" not in os.environ:
        return "needs Horovod's ranks: start this by horovodrun instead of torchrun"
    return Needs("horovod", "horovod")()


_SUMS = frozenset({"all_reduce", "reduce_scatter"})
CONTENDERS = (
    _contender("horovod", "Horovod, uncompressed", "none", _SUMS | {"all_gather", "broadcast", "all_to_all"}),
    _contender("horovod-fp16", "Horovod with Compression.fp16", "fp16", _SUMS),
)
