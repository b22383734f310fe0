"""The ways to exchange a tensor that `ncz perf` compares, ours among them, on the same data in the same run.

    exchange       what a peer is, and what it offers: to open it, and then to run one collective as often as wanted
    collectives    one call each: plain, NCCL, half the bytes by a cast, and ours
    hooks          the communication hooks that torch ships for DistributedDataParallel
    horovod        Horovod, with and without its compression
    hivemind       8-bit quantization around a butterfly all-reduce
    lossless       zstd and lz4 around an all-gather

Each is used the way that is fast in practice: buffers are kept, and nothing is copied that need not be. Where the
result takes the place of the input in practice (all-reduce, broadcast), every peer first copies its input, or casts it,
within the time that is taken. Libraries are imported when a peer is opened.
"""

from __future__ import annotations

from . import collectives, hivemind, hooks, horovod, lossless
from .exchange import Context, Exchange, Peer

__all__ = ["PEERS", "Context", "Exchange", "Peer"]

PEERS: dict[str, Peer] = {
    peer.name: peer for module in (collectives, hooks, horovod, hivemind, lossless) for peer in module.PEERS
}
