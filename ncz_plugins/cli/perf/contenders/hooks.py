"""torch's communication hooks for DistributedDataParallel, called as it calls them: on a bucket of gradients.

A hook gets a GradBucket, which only DDP's reducer can make. So one backward pass of a model with a single parameter
makes it, and its hook keeps it; afterwards the bucket is filled and the hook of the contender is called, by what
DDP does with a bucket that is full. Of DDP itself, nothing is in the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from .exchange import Contender, Context, Exchange

_FIRST_STEP = 2  # PowerSGD leaves at least two steps of a training uncompressed


class Hook(Exchange):
    """A hook on a bucket that holds one parameter.

    Args:
        hook: takes its state and the bucket, and returns the future of a tensor.
        state: makes that state, anew for each size. A tensor of n elements is a parameter of about sqrt(n) rows then,
            with zeros behind the last element; without it, it is a vector, and the state the process group.
    """

    summed = "avg"

    def __init__(self, context: Context, hook: Callable, state: Callable[[Context], Any] | None = None):
        super().__init__(context)
        self._hook = hook
        self._make_state = state
        self._state: tuple[int, Any] = (0, context.group)

    def load(self, tensor: Tensor) -> None:
        super().load(tensor)
        numel = tensor.numel()
        shape = (numel,)
        if self._make_state is not None:
            rows = math.isqrt(numel)
            shape = (rows, -(-numel // rows))
            if self._state[0] != numel:
                self._state = numel, self._make_state(self.context)
        make = partial(grad_bucket, shape, tensor.device, self.context.group)
        self._bucket = self.context.keep(f"bucket of {len(shape)} dimensions", (shape, tensor.device), make)
        self._bucket.buffer()[:numel].copy_(tensor)
        self._bucket.buffer()[numel:].zero_()

    def run(self) -> Tensor:
        return self._hook(self._state[1], self._bucket).wait()[: self.tensor.numel()]


class _OneParameter(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))

    def forward(self) -> Tensor:
        return self.weight.sum()


def grad_bucket(shape: tuple[int, ...], device: torch.device, group: dist.ProcessGroup) -> dist.GradBucket:
    """The bucket that DDP makes for a model with one parameter of this shape; nothing is sent for it."""
    buckets = []

    def keep(_, bucket):  # DDP refuses annotations that are strings, as they are in this file
        buckets.append(bucket)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = DistributedDataParallel(
        _OneParameter(shape, device), process_group=group, init_sync=False, gradient_as_bucket_view=True
    )
    model.register_comm_hook(None, keep)
    model().backward()
    return buckets[0]


def _power_sgd(rank: int, context: Context) -> powerSGD_hook.PowerSGDState:
    state = powerSGD_hook.PowerSGDState(context.group, matrix_approximation_rank=rank, start_powerSGD_iter=_FIRST_STEP)
    state.iter = _FIRST_STEP  # as if those steps were over
    return state


def _for_gloo(hook: Callable) -> Callable:
    """The same code, such that it works with gloo.

    torch's quantization hooks expect that the future of an all-gather holds one tensor with a row for each rank. With
    gloo it holds the tensors of the list that was passed, and they fail. So the code gets an all-gather that they like.
    """

    def all_gather(outputs: list[Tensor], tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> SimpleNamespace:
        gathered = dist.all_gather(outputs, tensor, group=group, async_op=async_op).get_future()
        return SimpleNamespace(get_future=lambda: gathered.then(lambda _: [torch.stack(outputs)]))

    names = {**hook.__globals__, "dist": SimpleNamespace(all_gather=all_gather)}
    return FunctionType(hook.__code__, names, hook.__name__, hook.__defaults__)


def _contender(name: str, description: str, *hook: Any) -> Contender:
    return Contender(name, description, lambda context: Hook(context, *hook), frozenset({"all_reduce"}))


CONTENDERS = (
    _contender("ddp-fp16", "DDP's fp16_compress_hook", default_hooks.fp16_compress_hook),
    _contender("ddp-bf16", "DDP's bf16_compress_hook", default_hooks.bf16_compress_hook),
    *(
        _contender(
            f"ddp-powersgd-{rank}",
            f"DDP's powerSGD_hook, rank {rank}, warm start and error feedback, on the tensor as a square matrix",
            powerSGD_hook.powerSGD_hook,
            partial(_power_sgd, rank),
        )
        for rank in (1, 4)
    ),
    _contender(
        "ddp-int8",
        "DDP's quantization_pertensor_hook: 8 bits, one scale, all-gather",
        _for_gloo(quantization_hooks.quantization_pertensor_hook),
    ),
    _contender(
        "ddp-int8-channel",
        "DDP's quantization_perchannel_hook: 8 bits, a scale per 512 values, all-gather",
        _for_gloo(quantization_hooks.quantization_perchannel_hook),
    ),
)
