"""The ways to exchange a tensor that `ncz perf` compares, ours among them, on the same data in the same run.

    exchange       what a contender is, and what it offers once it is open: one collective, run as often as wanted
    collectives    one call each: plain, NCCL, half the bytes by a cast, and ours
    hooks          the communication hooks that torch ships for DistributedDataParallel
    horovod        Horovod, with and without its compression
    hivemind       8-bit quantization around a butterfly all-reduce
    lossless       zstd and lz4 around an all-gather

Each is used the way that is fast in practice: buffers are kept, and nothing is copied that need not be. Where the
result takes the place of the input in practice (all-reduce, broadcast), every contender first copies or casts its
input, and that counts as its time. Libraries are imported when a contender is opened.
"""

from __future__ import annotations

from . import collectives, hivemind, hooks, horovod, lossless
from .exchange import Contender, Context, Exchange

__all__ = ["CONTENDERS", "Context", "Exchange", "Contender"]

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for module in (collectives, hooks, horovod, hivemind, lossless)
    for contender in module.CONTENDERS
}
