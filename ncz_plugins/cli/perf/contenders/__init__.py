"""Contenders: ways to exchange a tensor, ours among them, that `ncz perf` compares on the same data.

exchange     base classes: a contender, and one collective that it runs again and again
collectives  one call of a collective: plain, NCCL, cast to 16 bits, and ours
fp8          8-bit floats, for collectives without a sum
hooks        communication hooks of torch for DistributedDataParallel

Each contender is used in the way that is fast in practice: buffers are reused, and nothing is copied without need. If
the result replaces the input (all-reduce, broadcast), the contender copies or casts its input first; a cast counts as
its time.
"""

from __future__ import annotations

from . import collectives, fp8, hooks
from .exchange import Contender, Context, Exchange

__all__ = ["CONTENDERS", "Context", "Exchange", "Contender"]

CONTENDERS: dict[str, Contender] = {
    contender.name: contender for module in (collectives, fp8, hooks) for contender in module.CONTENDERS
}
