"""What a step of training sends, by strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from ...core.config import MiB
from .workload import Workload

Phase = Literal["forward", "backward", "after"]

_DDP_BUCKET = 25 * MiB  # torch's bucket_cap_mb
_DEEPSPEED_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
_UNITS = 32  # that FSDP gathers and reduces one by one: layers, of which most models have about so many


class Sending(NamedTuple):
    """Collectives of a step, all alike.

    Attributes:
        collective: all_reduce, reduce_scatter or all_gather.
        nbytes: of the whole tensor of each call.
        count: of calls.
        phase: of the computation that they run beside; "after": beside none.
        role: gradient or parameter.
        steps: in how many steps they happen once.
        inside: whether all of a node's ranks hold parts of it and only nodes exchange it (HSDP).
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


def _buckets(collective: str, nbytes: int, bucket: int, phase: Phase) -> Iterator[Sending]:
    """Gradients in buckets of one size."""
    count = max(1, round(nbytes / bucket))
    yield Sending(collective, nbytes // count, count, phase, "gradient")


def _ddp(workload: Workload, every: int) -> Iterator[Sending]:
    """DistributedDataParallel, and Horovod: gradients in buckets, beside the backward pass."""
    yield from _buckets("all_reduce", workload.gradient_bytes, _DDP_BUCKET, "backward")


def _zero_0(workload: Workload, every: int) -> Iterator[Sending]:
    """DeepSpeed without ZeRO: gradients in buckets, after the backward pass."""
    bucket = _DEEPSPEED_BUCKET * workload.itemsize
    yield from _buckets("all_reduce", workload.gradient_bytes, bucket, "after")


def _zero_1(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 1: gradients after the backward pass, weights after the optimizer."""
    yield from _zero_0(workload, every)
    yield from _weights(workload)


def _zero_2(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 2 with overlap_comm: gradients beside the backward pass, weights after the optimizer."""
    bucket = _DEEPSPEED_BUCKET * workload.itemsize
    yield from _buckets("all_reduce", workload.gradient_bytes, bucket, "backward")
    yield from _weights(workload)


def _weights(workload: Workload) -> Iterator[Sending]:
    yield Sending("all_gather", workload.parameters * workload.itemsize, 1, "after", "parameter")


def _zero_3(workload: Workload, every: int) -> Iterator[Sending]:
    """ZeRO 3 and FSDP: each layer's weights before its forward and its backward pass, its gradients after that."""
    weights = workload.parameters * workload.itemsize // _UNITS
    for phase in ("forward", "backward"):
        yield Sending("all_gather", weights, _UNITS, phase, "parameter")
    yield Sending("reduce_scatter", workload.gradient_bytes // _UNITS, _UNITS, "backward", "gradient")


def _hsdp(workload: Workload, every: int) -> Iterator[Sending]:
    """FSDP inside a node, gradients all-reduced between nodes. What stays in a node is not counted."""
    nbytes = workload.gradient_bytes // _UNITS
    yield Sending("all_reduce", nbytes, _UNITS, "backward", "gradient", inside=True)


def _diloco(workload: Workload, every: int) -> Iterator[Sending]:
    """DiLoCo: every so many steps the replicas average what they have moved by, in float32."""
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
    """What a step sends.

    Args:
        every: with diloco, steps from one synchronization to the next.
    """
    return list(STRATEGIES[strategy](workload, every))
