"""Registry of tensors that wait for their reduction.

Ranks may compute gradients in different orders, and some ranks may compute gradients that others don't, until the
optimizer synchronizes. By then all ranks have submitted the same names. Buckets of the optimizer's plan are reduced
earlier, as soon as they are complete on all ranks.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref

import horovod.torch as hvd
from torch import Tensor

from ..core.errors import UnsupportedError
from .bucket_plan import BucketPlan
from .compressor import NCZ, OptimizerCompressor
from .pending import PendingTensor, ReductionHandle
from .process_set import Job, ProcessSetReducer

_CLOSING_SECONDS = 10.0  # how long hvd.init waits for reductions under way, which then fail


class _Reductions:
    """Handles, plans and threads from one `hvd.init` to the next. An elastic reset starts with an empty registry.

    Handles are held by weak references. Tensors whose handle the program dropped are not reduced: an optimizer drops
    its handles when it loads a state.
    """

    def __init__(self):
        # The ranks are the key: Horovod reuses the number of a removed process set for a new one with other ranks.
        self._reducers: dict[tuple[int, ...], ProcessSetReducer] = {}
        self._plans: weakref.WeakKeyDictionary[OptimizerCompressor, BucketPlan] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._handles: list[weakref.ref[ReductionHandle]] = []
        self._lock = threading.Lock()  # autograd submits gradients from one thread for each device

    def submit(self, handle: ReductionHandle) -> ReductionHandle:
        """Add a handle, and start to reduce the buckets that it completes. Raises UnsupportedError in a fork."""
        self._require_own_process()
        self._handles.append(weakref.ref(handle))
        plan = self._plans.get(handle.owner)
        if plan is not None and handle.owner.compressor.may_run_ahead:
            job = Job(handle.owner, plan, handle.process_set)
            with self._lock:
                for number, bucket in plan.complete(handle.tensors):
                    plan.under_way.append(self._reducer(handle.process_set).start(job, number, bucket))
        return handle

    def reduce_all(self, owner: NCZ | OptimizerCompressor) -> None:
        """Reduce all tensors of one owner that wait, and end its step."""
        self._require_own_process()
        owner.compressor.begin()
        alive = [handle for reference in self._handles if (handle := reference()) is not None]
        mine = sorted((each for each in alive if each.owner is owner), key=lambda each: each.process_set.process_set_id)
        self._handles = [weakref.ref(each) for each in alive if each.owner is not owner]
        # Reduce each process set by itself: the other ranks of a set need not be in all sets of this rank.
        for _, of_one_set in itertools.groupby(mine, key=lambda each: each.process_set.process_set_id):
            handles = list(of_one_set)
            tensors = sorted((each for handle in handles for each in handle.tensors), key=lambda each: each.order)
            self._finish_step(owner, tensors, handles[0].process_set)
            for handle in handles:
                handle.done = True
        owner.compressor.end_reduction(owner)

    def close(self) -> None:
        """End the threads."""
        for reducer in self._reducers.values():
            reducer.close(_CLOSING_SECONDS)

    def _finish_step(
        self, owner: NCZ | OptimizerCompressor, tensors: list[PendingTensor], process_set: hvd.ProcessSet
    ) -> None:
        """Reduce those of `tensors` that no bucket has reduced yet.

        Args:
            tensors: all tensors of one owner in one process set and step, in order.
        """
        plan = self._plans.pop(owner, None)
        if plan is not None:
            plan.wait()
        if plan is None or not plan.covers(tensors):
            plan = BucketPlan(tensors, owner.positions)
        if rest := [pending for pending in tensors if not pending.reduced]:
            self._reducer(process_set).reduce(Job(owner, plan, process_set), rest)
        if owner.positions:
            plan.begin()
            self._plans[owner] = plan

    def _reducer(self, process_set: hvd.ProcessSet) -> ProcessSetReducer:
        ranks = tuple(process_set.ranks)
        if ranks not in self._reducers:
            self._reducers[ranks] = ProcessSetReducer()
        return self._reducers[ranks]

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"process {os.getpid()} is a fork of process {self._process}, and Horovod's threads and "
                "connections do not work in a fork. Start processes by spawn or forkserver"
            )


_current = _Reductions()


def reset() -> None:
    """Forget everything. `hvd.init` calls this."""
    global _current
    before, _current = _current, _Reductions()
    before.close()


def wait_for(handle: ReductionHandle) -> Tensor | list[Tensor]:
    """Reduce all tensors of the handle's owner that wait, and return the result of this handle."""
    if not handle.done:
        _current.reduce_all(handle.owner)
    return handle.result()


def submit(handle: ReductionHandle) -> ReductionHandle:
    """Add a handle to those that wait for their reduction."""
    return _current.submit(handle)
