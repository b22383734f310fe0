"""Uncompressed collectives by a process group of torch.distributed.

They call methods of the process group. The functions of torch.distributed refuse a group that torch did not register,
such as our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..errors import PeerError, fresh, without_frames
from ..runtime.handle import Handle, seconds_of
from .base import PlainCollectives, Tag, Work, peer_errors
from .nccl_classes import is_nccl


class TorchCollectives(PlainCollectives):
    """Collectives of a torch.distributed process group.

    Args:
        group: returns the process group. Called each time, and nothing here keeps the group, so its owner can close it.
        track: takes each work that was started, and returns the work for the caller. The group's owner may use it to
            know the works that are under way.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], track: Callable[[dist.Work], Work] = lambda work: work):
        self._group = group
        self._track = track

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp, divisor = self._without_average(op, tensor)
        divisor /= scale
        work = self._track(self._group().allreduce([tensor], options))
        return work if divisor == 1 else _DividedWork(work, tensor, divisor)

    def reduce(self, tensor: Tensor, root: int, op=dist.ReduceOp.SUM) -> Work:
        options = dist.ReduceOptions()
        options.reduceOp, divisor = self._without_average(op, tensor)
        options.rootRank = root
        if self._group().rank() != root and not tensor.is_cuda:  # gloo would leave sums of some ranks in it
            tensor = tensor.clone()
        work = self._track(self._group().reduce([tensor], options))
        return work if divisor == 1 else _DividedWork(work, tensor, divisor)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op=dist.ReduceOp.SUM) -> Work:
        options = dist.ReduceScatterOptions()
        options.reduceOp, divisor = self._without_average(op, input)
        work = self._track(self._group()._reduce_scatter_base(output, input, options))
        return work if divisor == 1 else _DividedWork(work, output, divisor)

    def all_gather_single(self, output: Tensor, input: Tensor) -> Work:
        return self._track(self._group()._allgather_base(output, input))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Work:
        splits = list(received), list(sent)
        return self._track(self._group().alltoall_base(output, input, *splits, dist.AllToAllOptions()))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._track(self._group().broadcast([tensor], options))

    def exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int = Tag.PLAIN
    ) -> list[Work]:
        """See `PlainCollectives.exchange`.

        With NCCL all of it is one operation, as otherwise ranks that all send first would wait for each other for ever.

        Args:
            tag: number that only these messages between the ranks have.
        """
        fused = is_nccl(self._group())
        if fused:
            self._group()._start_coalescing()
        works = [self._track(self._group().send([tensor], rank, tag)) for rank, tensor in sends]
        works += [self._track(self._group().recv([tensor], rank, tag)) for rank, tensor in receives]
        if fused:
            works = [self._track(self._group()._end_coalescing())] * len(works)
        return works

    def _without_average(self, op, tensor: Tensor):
        """Replace AVG by SUM and a divisor for floats in host memory, as gloo has no AVG. Returns (op, divisor)."""
        if op == dist.ReduceOp.AVG and tensor.is_floating_point() and tensor.device.type == "cpu":
            return dist.ReduceOp.SUM, self._group().size()
        return op, 1


class GroupTransport(NamedTuple):
    """Transport of the uncompressed collectives of one process group: see `CollectiveTransport`."""

    rank: int
    world_size: int
    plain: PlainCollectives


class _DividedWork:
    """Work of a sum that is divided by a number when the work is waited for."""

    def __init__(self, work: Work, tensor: Tensor, divisor: float):
        self._work = work
        self._tensor = tensor.detach()  # autograd lets nobody divide parameters in place
        self._divisor = divisor
        self._lock = threading.Lock()

    def wait(self, *timeout) -> bool:
        self._work.wait(*timeout)
        return self._divide()

    def get_future(self) -> Future:
        """A future like that of torch.distributed's works, except for its value."""
        # Not `wait`, as a work may become complete only after the callbacks of its future.
        return self._work.get_future().then(lambda done: (done.value(), self._divide()))

    def is_completed(self) -> bool:
        return self._work.is_completed() and self.wait()  # waiting for a work that is complete takes no time

    def _divide(self) -> bool:
        """Divide the sum, once for all threads. Returns True."""
        with self._lock:
            if self._divisor != 1:
                self._tensor.div_(self._divisor)
                self._divisor = 1
        return True


class WorkHandle(Handle):
    """Handle of an uncompressed collective.

    Args:
        work: the collective's work.
        doing: what is being done: the first words of an error.
    """

    def __init__(self, work: Work, doing: str):
        self._work = work
        self._doing = doing
        self._error: PeerError | None = None

    def wait(self, timeout=None) -> bool:
        if self._error is not None:
            raise fresh(self._error)
        try:
            with peer_errors(self._doing):
                return self._work.wait() if timeout is None else self._work.wait(timedelta(seconds=seconds_of(timeout)))
        except PeerError as error:
            self._error = without_frames(error)
            raise

    def is_completed(self) -> bool:
        return self._error is not None or self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if self._error is None and self._work.is_completed():
            with suppress(PeerError):
                self.wait()  # takes no time: the work is complete
        return self._error

    def get_future(self) -> Future[list[Tensor]]:
        def result(done: Future) -> list[Tensor]:
            with peer_errors(self._doing):
                done.value()
            return list(self.outputs)

        return self._work.get_future().then(result)
