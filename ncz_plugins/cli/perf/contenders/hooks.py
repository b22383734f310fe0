"""Communication hooks of torch for DistributedDataParallel, called as DDP calls them: with a bucket of gradients.

Only the reducer of DDP can make a GradBucket. So a backward pass of a model with a single parameter makes one, and its
hook keeps it. Afterwards the bucket is filled with the data, and the hook to measure is called. The time of DDP itself
is not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from .exchange import Contender, Context, Exchange

_FIRST_STEP = 2  # PowerSGD sends at least the first two steps of a training uncompressed


class Hook(Exchange):
    """Exchange by a hook on a bucket with one parameter.

    Args:
        hook: takes a state and the bucket, and returns the future of a tensor.
        state: makes the state, once for each size; the parameter is then a matrix of about sqrt(n) rows, padded with
            zeros. None: the state is the process group, and the parameter is a vector.
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
    """Bucket that DDP makes for a model with one parameter of this shape. Nothing is sent."""
    buckets = []

    def keep(_, bucket):  # without annotations: DDP refuses strings, which they are in this file
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
    state.iter = _FIRST_STEP  # as after these steps
    return state


def contender(name: str, description: str, *hook: Any) -> Contender:
    """A contender that calls a hook of DDP; for `hook` see `Hook`."""
    return Contender(name, description, lambda context: Hook(context, *hook), frozenset({"all_reduce"}))


CONTENDERS = (
    contender("ddp-fp16", "DDP's fp16_compress_hook", default_hooks.fp16_compress_hook),
    contender("ddp-bf16", "DDP's bf16_compress_hook", default_hooks.bf16_compress_hook),
    *(
        contender(
            f"ddp-powersgd-{rank}",
            f"DDP's powerSGD_hook, rank {rank}, warm start and error feedback, on the tensor as a square matrix",
            powerSGD_hook.powerSGD_hook,
            partial(_power_sgd, rank),
        )
        for rank in (1, 4)
    ),
)
