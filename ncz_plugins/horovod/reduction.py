"""Tensors are collected until all ranks have submitted the same, and then reduced.

Ranks may produce gradients in different orders, and which ones they produce may differ until the optimizer
synchronizes; by then all have submitted the same names. Buckets of the optimizer's plan may be reduced before, as soon
as they are complete on all ranks.
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

_CLOSING_SECONDS = 10.0  # for what is under way when Horovod is initialized again, which fails then


class _Reductions:
    """What is pending and under way from one `hvd.init` to the next; an elastic reset begins with a clean one.

    Handles that their owner dropped, as the optimizer does when it is restored, are not waited for any more.
    """

    def __init__(self):
        # By ranks, as Horovod gives the number of a removed process set to a new one with other ranks.
        self._reducers: dict[tuple[int, ...], ProcessSetReducer] = {}
        self._plans: weakref.WeakKeyDictionary[OptimizerCompressor, BucketPlan] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._pending: list[weakref.ref[Pending]] = []
        self._lock = threading.Lock()  # autograd has a thread for each device, and all of them submit gradients

    def submit(self, pending: Pending) -> Pending:
        """Put among the pending, and begin to reduce the buckets that are complete now."""
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
        """Reduce all that is pending for one owner."""
        self._require_own_process()
        compressor.begin()
        alive = [pending for reference in self._pending if (pending := reference()) is not None]
        mine = sorted((p for p in alive if p.owner is owner), key=lambda p: p.process_set.process_set_id)
        self._pending = [weakref.ref(p) for p in alive if p.owner is not owner]
        # Other ranks of a process set need not be in all of this rank's sets, so each is reduced by itself.
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
        """Reduce what is left of `tensors`, all that a step reduces for one owner in one process set."""
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
                f"process {os.getpid()} is a fork of process {self._process}, which has Horovod's threads and "
                "connections to itself. Start processes by spawn or forkserver"
            )


_current = _Reductions()


def reset() -> None:
    """Forget everything; called when Horovod is initialized."""
    global _current
    before, _current = _current, _Reductions()
    before.close()


def wait_for(pending: Pending) -> Tensor | list[Tensor]:
    """Reduce everything that is pending for the same owner, and return the result(s) of this one."""
    return pending.result(_current.reduce_all)


def submit(pending: Pending) -> Pending:
    """Put tensors among the pending."""
    return _current.submit(pending)
