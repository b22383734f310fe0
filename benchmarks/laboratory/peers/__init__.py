"""Contenders of the laboratory: those of `ncz perf`, and libraries that users would pick instead.

horovod     Horovod, with and without its compression
hivemind    8-bit quantization of hivemind around a butterfly all-reduce
lossless    zstd and lz4 around an all-gather
int8_hooks  8-bit hooks of torch for DistributedDataParallel

Libraries are imported when a contender is opened.
"""

from __future__ import annotations

from ncz_plugins.cli.perf.contenders import CONTENDERS as OF_NCZ_PERF
from ncz_plugins.cli.perf.contenders import Contender

from . import hivemind, horovod, int8_hooks, lossless

__all__ = ["CONTENDERS"]

CONTENDERS: dict[str, Contender] = OF_NCZ_PERF | {
    contender.name: contender for module in (int8_hooks, horovod, hivemind, lossless) for contender in module.CONTENDERS
}
