"""Collectives of a training step, by strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from ...core.config import MiB
from .workload import Workload

Phase = Literal["forward", "backward", "after"]

_DDP_BUCKET_BYTES = 25 * MiB  # default of bucket_cap_mb in torch
_DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # default of reduce_bucket_size in DeepSpeed
_LAYERS = 32  # that FSDP gathers and reduces one by one; a typical number


class Sending(NamedTuple):
    """Equal collectives of one step.

    Attributes:
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: bytes of the whole tensor of each call.
        count: number of calls.
        phase: phase of computing that they overlap; "after" overlaps none.
        role: "gradient" or "parameter".
        steps: number of steps in which they happen once.
        inside: whether the ranks of a node hold parts of the tensor, and only nodes exchange it (HSDP).
        itemsize: bytes of a value; None: those of a gradient.
    """

    collective: str
    nbytes: int
    count: int
    phase: Phase
    role: str
    steps: int = 1
    inside: bool = False
    itemsize: int | None = None


def _buckets(collective: str, nbytes: int, bucket_bytes: int, phase: Phase) -> Iterator[Sending]:
    """Gradients in buckets of equal size, about `bucket_bytes` each."""
    count = max(1, round(nbytes / bucket_bytes))
    yield Sending(collective, nbytes // count, count, phase, "gradient")


def _ddp(workload: Workload, every: int) -> Iterator[Sending]:
    """DistributedDataParallel, and Horovod: gradients in buckets, beside the backward pass."""
    yield from _buckets("all_reduce", workload.gradient_bytes, _DDP_BUCKET_BYTES, "backward")


def _zero_0(workload: Workload, every: int) -> Iterator[Sending]:
    """DeepSpeed without ZeRO: gradients in buckets, after the backward pass."""
    bucket = _DEEPSPEED_BUCKET_ELEMENTS * workload.itemsize
    yield from _buckets("all_reduce", workload.gradient_bytes, bucket, "after")


def _zero_1(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 1: gradients after the backward pass, weights after the optimizer."""
    yield from _zero_0(workload, every)
    yield from _weights(workload)


def _zero_2(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 2 with overlap_comm: gradients beside the backward pass, weights after the optimizer."""
    bucket = _DEEPSPEED_BUCKET_ELEMENTS * workload.itemsize
    yield from _buckets("all_reduce", workload.gradient_bytes, bucket, "backward")
    yield from _weights(workload)


def _weights(workload: Workload) -> Iterator[Sending]:
    yield Sending("all_gather", workload.parameters * workload.itemsize, 1, "after", "parameter")


def _zero_3(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 3 and FSDP: each layer's weights before its forward and its backward pass, its gradients after that."""
    weights = workload.parameters * workload.itemsize // _LAYERS
    for phase in ("forward", "backward"):
        yield Sending("all_gather", weights, _LAYERS, phase, "parameter")
    yield Sending("reduce_scatter", workload.gradient_bytes // _LAYERS, _LAYERS, "backward", "gradient")


def _hsdp(workload: Workload, every: int) -> Iterator[Sending]:
    """FSDP inside a node, gradients all-reduced between nodes. What stays in a node is not counted."""
    nbytes = workload.gradient_bytes // _LAYERS
    yield Sending("all_reduce", nbytes, _LAYERS, "backward", "gradient", inside=True)


def _diloco(workload: Workload, every: int) -> Iterator[Sending]:
    """DiLoCo: once in `every` steps, replicas average the changes of their weights, in float32."""
    yield Sending("all_reduce", 4 * workload.parameters, 1, "after", "gradient", steps=every, itemsize=4)


STRATEGIES: dict[str, Callable[[Workload, int], Iterator[Sending]]] = {
    "ddp": _ddp,
    "horovod": _ddp,
    "zero-0": _zero_0,
    "zero-1": _zero_1,
    "zero-2": _zero_2,
    "zero-3": _zero_3,
    "fsdp": _zero_3,
    "hsdp": _hsdp,
    "diloco": _diloco,
}


def sendings(strategy: str, workload: Workload, every: int = 500) -> list[Sending]:
    """Collectives of a step.

    Args:
        strategy: a key of STRATEGIES.
        workload: the training.
        every: with diloco, steps from one synchronization to the next.
    """
    return list(STRATEGIES[strategy](workload, every))
