"""Quantization hooks of torch for DistributedDataParallel, prototypes that need changes to work with gloo."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

from ncz_plugins.cli.perf.contenders.hooks import contender


def _for_gloo(hook: Callable) -> Callable:
    """A copy of a hook that works with gloo.

    torch's quantization hooks expect the future of an all-gather to hold one tensor with a row for each rank. With gloo
    it holds a list of tensors, and the hooks fail. So the copy calls an all-gather that stacks them.
    """

    def all_gather(outputs: list[Tensor], tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> SimpleNamespace:
        gathered = dist.all_gather(outputs, tensor, group=group, async_op=async_op).get_future()
        return SimpleNamespace(get_future=lambda: gathered.then(lambda _: [torch.stack(outputs)]))

    names = {**hook.__globals__, "dist": SimpleNamespace(all_gather=all_gather)}
    return FunctionType(hook.__code__, names, hook.__name__, hook.__defaults__)


CONTENDERS = (
    contender(
        "ddp-int8",
        "DDP's quantization_pertensor_hook: 8 bits, one scale, all-gather",
        _for_gloo(quantization_hooks.quantization_pertensor_hook),
    ),
    contender(
        "ddp-int8-channel",
        "DDP's quantization_perchannel_hook: 8 bits, a scale per 512 values, all-gather",
        _for_gloo(quantization_hooks.quantization_perchannel_hook),
    ),
)
