"""Registry of pending tensors: they are collected until all ranks have submitted the same, and then reduced.

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
from .pending import Pending, PendingTensor
from .process_set import Job, ProcessSetReducer

_CLOSING_SECONDS = 10.0  # how long hvd.init waits for reductions under way, which then fail


class _Reductions:
    """Pending tensors, plans and threads from one `hvd.init` to the next. An elastic reset starts with an empty one.

    Handles are held by weak references: what the program drops, as an optimizer does when it is restored, is not
    reduced.
    """

    def __init__(self):
        # The ranks are the key: Horovod reuses the number of a removed process set for a new one with other ranks.
        self._reducers: dict[tuple[int, ...], ProcessSetReducer] = {}
        self._plans: weakref.WeakKeyDictionary[OptimizerCompressor, BucketPlan] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._pending: list[weakref.ref[Pending]] = []
        self._lock = threading.Lock()  # autograd submits gradients from one thread for each device

    def submit(self, pending: Pending) -> Pending:
        """Add a handle to the pending ones, and start to reduce the buckets that it completes.

        Raises UnsupportedError in a fork.
        """
        self._require_own_process()
        self._pending.append(weakref.ref(pending))
        plan = self._plans.get(pending.owner)
        if plan is not None and pending.compressor.may_run_ahead:
            job = Job(pending.compressor, pending.owner, plan, pending.process_set)
            with self._lock:
                for number, bucket in plan.complete(pending.tensors):
                    plan.under_way.append(self._reducer(pending.process_set).start(job, number, bucket))
        return pending

    def reduce_all(self, compressor: NCZ, owner: NCZ | OptimizerCompressor) -> None:
        """Reduce everything that is pending for one owner, and end its step."""
        self._require_own_process()
        compressor.begin()
        alive = [pending for reference in self._pending if (pending := reference()) is not None]
        mine = sorted((p for p in alive if p.owner is owner), key=lambda p: p.process_set.process_set_id)
        self._pending = [weakref.ref(p) for p in alive if p.owner is not owner]
        # Reduce each process set by itself: the other ranks of a set need not be in all sets of this rank.
        for _, of_one_set in itertools.groupby(mine, key=lambda p: p.process_set.process_set_id):
            pendings = list(of_one_set)
            tensors = sorted((each for p in pendings for each in p.tensors), key=lambda each: each.order)
            self._finish_step(compressor, owner, tensors, pendings[0].process_set)
            for pending in pendings:
                pending.done = True
        compressor.end_reduction(owner)

    def close(self) -> None:
        """End the threads."""
        for reducer in self._reducers.values():
            reducer.close(_CLOSING_SECONDS)

    def _finish_step(
        self,
        compressor: NCZ,
        owner: NCZ | OptimizerCompressor,
        tensors: list[PendingTensor],
        process_set: hvd.ProcessSet,
    ) -> None:
        """Reduce those of `tensors` that no bucket has reduced yet.

        Args:
            tensors: all that this step reduces for one owner in one process set, in order.
        """
        plan = self._plans.pop(owner, None)
        if plan is not None:
            plan.wait()
        if plan is None or not plan.covers(tensors):
            plan = BucketPlan(tensors, owner.positions)
        if rest := [pending for pending in tensors if not pending.reduced]:
            self._reducer(process_set).reduce(Job(compressor, owner, plan, process_set), rest)
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


def wait_for(pending: Pending) -> Tensor | list[Tensor]:
    """Reduce everything that is pending for the same owner, and return the result of this handle."""
    return pending.result(_current.reduce_all)


def submit(pending: Pending) -> Pending:
    """Add a handle to the pending ones."""
    return _current.submit(pending)
