"""Contenders that make one call of a collective: plain, cast to 16 bits, over NCCL, and compressed by us."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.communicator import Communicator
from ....core.training.baseline import Baseline
from .exchange import Contender, Context, Exchange

# torch 2.13 has renamed these, and some versions warn of the older names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_COLLECTIVES = (
    "all_reduce",
    "reduce_scatter_single",
    "reduce",
    "all_gather_single",
    "gather",
    "broadcast",
    "scatter",
    "all_to_all_single",
    "batch_isend_irecv",
)


class Call(Exchange):
    """Exchange by one call with the signature of torch.distributed.

    Args:
        calls: what `of_torch` returns, or an object with the same functions and `group`.
        dtype: dtype that the tensor is cast to before the call, and its result from; None for no cast.
    """

    def __init__(self, context: Context, calls, dtype: torch.dtype | None = None):
        super().__init__(context)
        self._calls = calls
        self._dtype = dtype
        self._collective = getattr(self, f"_{context.collective}")

    def load(self, tensor: Tensor) -> None:
        is_overwritten = self.context.collective in ("all_reduce", "reduce", "broadcast")
        in_place = is_overwritten and self._dtype in (None, tensor.dtype)
        self.tensor = self._buffer("whole", tensor.numel(), tensor).copy_(tensor) if in_place else tensor

    def run(self) -> Tensor:
        result = self._collective(self.tensor)
        if result.dtype == self.tensor.dtype:
            return result
        return self.context.buffer("result", result.numel(), self.tensor).copy_(result)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        whole = self._cast("whole", tensor)
        self._calls.all_reduce(whole)
        return whole

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = self._buffer("part", tensor.numel() // self.context.world_size, tensor)
        self._calls.reduce_scatter_single(part, self._cast("whole", tensor))
        return part

    def _reduce(self, tensor: Tensor) -> Tensor:
        whole = self._cast("whole", tensor)
        self._calls.reduce(whole, self.root)
        return whole if self.is_root else whole[:0]

    def _all_gather(self, tensor: Tensor) -> Tensor:
        whole = self._buffer("whole", tensor.numel() * self.context.world_size, tensor)
        self._calls.all_gather_single(whole, self._cast("part", tensor))
        return whole

    def _gather(self, tensor: Tensor) -> Tensor:
        whole = self._buffer("whole", tensor.numel() * self.context.world_size if self.is_root else 0, tensor)
        parts = list(whole.chunk(self.context.world_size)) if self.is_root else None
        self._calls.gather(self._cast("part", tensor), parts, self.root)
        return whole

    def _broadcast(self, tensor: Tensor) -> Tensor:
        whole = self._cast("whole", tensor)
        self._calls.broadcast(whole, self.root)
        return whole

    def _scatter(self, tensor: Tensor) -> Tensor:
        part = self._buffer("part", tensor.numel() // self.context.world_size, tensor)
        parts = list(self._cast("whole", tensor).chunk(self.context.world_size)) if self.is_root else None
        self._calls.scatter(part, parts, self.root)
        return part

    def _all_to_all(self, tensor: Tensor) -> Tensor:
        arrived = self._buffer("arrived", tensor.numel(), tensor)
        self._calls.all_to_all_single(arrived, self._cast("whole", tensor))
        return arrived

    def _sendrecv(self, tensor: Tensor) -> Tensor:
        arrived = self._buffer("arrived", tensor.numel(), tensor)
        send_around(self._calls, self._cast("whole", tensor), arrived)
        return arrived

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """A copy in the dtype to send; the tensor itself if it has that dtype."""
        if self._dtype in (None, tensor.dtype):
            return tensor
        return self._buffer(name, tensor.numel(), tensor).copy_(tensor)

    def _buffer(self, name: str, numel: int, like: Tensor) -> Tensor:
        return self.context.buffer(name, numel, like, self._dtype or like.dtype)


class Ours(Call):
    """Exchange by a Communicator, with its counters as details."""

    def __init__(self, context: Context):
        self._communicator = Communicator(context.config, context.group)
        self._baseline = Baseline()
        super().__init__(context, _with_role(self._communicator, context.role))

    def _all_gather(self, tensor: Tensor) -> Tensor:
        if self.context.role != "parameter":
            return super()._all_gather(tensor)
        # A buffer that no other contender uses, as it must still contain the last version.
        whole = self._buffer("weights", tensor.numel() * self.context.world_size, tensor)
        self._calls.all_gather_single(whole, tensor, baseline=self._baseline)
        return whole

    def details(self) -> dict[str, Any]:
        return self._communicator.stats.end_step().to_dict()

    def close(self) -> None:
        self._communicator.close()


class OverNccl(Call):
    """Exchange by a plain call over NCCL, on this rank's GPU."""

    def __init__(self, context: Context):
        # The GPU that a ProcessGroupNCCL2 takes: see `nccl_classes`.
        self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        self._group = dist.new_group(dist.get_process_group_ranks(context.group), backend="nccl")
        super().__init__(context, of_torch(self._group))

    def load(self, tensor: Tensor) -> None:
        super().load(tensor.to(self._device))

    def run(self) -> Tensor:
        result = super().run()
        torch.cuda.synchronize(self._device)
        return result

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def of_torch(group: dist.ProcessGroup) -> SimpleNamespace:
    """The collectives of torch.distributed between the ranks of a group."""
    return SimpleNamespace(
        all_reduce=partial(dist.all_reduce, group=group),
        reduce_scatter_single=partial(reduce_scatter_single, group=group),
        reduce=partial(dist.reduce, group=group),
        all_gather_single=partial(all_gather_single, group=group),
        gather=partial(dist.gather, group=group),
        broadcast=partial(dist.broadcast, group=group),
        scatter=partial(dist.scatter, group=group),
        all_to_all_single=partial(dist.all_to_all_single, group=group),
        batch_isend_irecv=dist.batch_isend_irecv,
        group=group,
    )


def send_around(calls, sent: Tensor, arrived: Tensor) -> None:
    """Send a tensor to the next rank and receive one from the rank before, as sendrecv of nccl-tests."""
    group, ranks = calls.group, dist.get_process_group_ranks(calls.group)
    rank = group.rank()
    if len(ranks) == 1:
        arrived.copy_(sent)
        return
    operations = [
        dist.P2POp(dist.isend, sent, ranks[(rank + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, arrived, ranks[rank - 1], group),
    ]
    for work in calls.batch_isend_irecv(operations):
        work.wait()


def _with_role(communicator: Communicator, role: str | None) -> SimpleNamespace:
    """The collectives of a communicator, for tensors of a role."""
    calls = {name: partial(getattr(communicator, name), role=role) for name in _COLLECTIVES}
    return SimpleNamespace(**calls, group=communicator.group)


def _torch(context: Context, dtype: torch.dtype | None = None) -> Call:
    return Call(context, of_torch(context.group), dtype)


def _no_nccl() -> str | None:
    return None if torch.cuda.is_available() and dist.is_nccl_available() else "needs a GPU, and a torch that sees it"


CONTENDERS = (
    Contender("plain", "torch.distributed as it is: gloo for tensors in host memory", _torch),
    Contender("ncz", "ours, as configured", Ours),
    Contender("fp16", "cast to float16, torch.distributed, cast back", partial(_torch, dtype=torch.float16)),
    Contender("bf16", "cast to bfloat16, torch.distributed, cast back", partial(_torch, dtype=torch.bfloat16)),
    Contender("nccl", "NCCL on GPUs, uncompressed", OverNccl, missing=_no_nccl),
)
