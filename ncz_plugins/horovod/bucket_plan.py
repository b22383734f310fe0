"""Plan of which gradients of an optimizer are reduced together, the same on all ranks.

Each rank computes its gradients in its own order. The plan fixes the order of the buckets beforehand, so that a bucket
can be reduced as soon as it is complete, while the backward pass goes on. The plan depends on the parameters only, so a
resumed run has the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakValueDictionary

from ..core.runtime.handle import Handle
from .pending import PendingTensor

# Small enough to send most of a model before its backward pass ends, large enough to be worth the latency.
BUCKET_BYTES = 16 << 20


class BucketPlan:
    """Buckets of neighbouring gradients, and their progress in the current training step.

    Args:
        tensors: all tensors that a step reduces.
        positions: position of each parameter in its optimizer, by name. A backward pass computes gradients in about the
            reverse order, so that is the order of the buckets. Empty: all tensors are one bucket.

    Attributes:
        under_way: handles of the buckets of this step that were started before the step's end.
        stopped: True if no more buckets are started before the end of this step.
    """

    def __init__(self, tensors: Iterable[PendingTensor], positions: Mapping[str, int]):
        self._bucket_of: dict[tuple, int] = {}
        self._sizes: list[int] = []  # tensors of each bucket
        filled = enough = BUCKET_BYTES if positions else math.inf
        for pending in sorted(tensors, key=lambda each: (-positions.get(each.parameter.name, 0), each.order)):
            if filled >= enough:
                self._sizes.append(0)
                filled = 0
            self._bucket_of[pending.key] = len(self._sizes) - 1
            self._sizes[-1] += 1
            filled += pending.tensor.nbytes
        self.begin()

    def begin(self) -> None:
        """Start a new step: no tensor is ready."""
        # Weak references: if the program dropped the handle of a tensor, it must not complete a bucket of the next
        # backward pass.
        self._ready: dict[int, WeakValueDictionary[tuple, PendingTensor]] = {}
        self._next = 0
        self.stopped = False
        self.under_way: list[Handle] = []

    def stop(self) -> None:
        """Start no more buckets before the end of this step."""
        self.stopped = True

    def bucket_of(self, pending: PendingTensor) -> int:
        """Number of the bucket that holds a tensor of the plan."""
        return self._bucket_of[pending.key]

    def merge(self) -> None:
        """Merge all buckets into one, and start no more before the end of this step."""
        self._bucket_of = dict.fromkeys(self._bucket_of, 0)
        self._sizes = [len(self._bucket_of)]
        self.stop()

    def wait(self) -> None:
        """Wait for all buckets that were started. Raises the first error; later buckets may not have been reduced."""
        try:
            for handle in self.under_way:
                handle.wait()
        finally:
            self.stop()  # after an error, this stops the reductions that have not started

    def covers(self, tensors: Iterable[PendingTensor]) -> bool:
        """Whether the plan is for exactly these tensors."""
        return {pending.key for pending in tensors} == self._bucket_of.keys()

    def complete(self, tensors: Iterable[PendingTensor]) -> Iterator[tuple[int, list[PendingTensor]]]:
        """Note that tensors are ready. Yield each bucket that is now complete: its number and its tensors."""
        for pending in tensors:
            if pending.key in self._bucket_of:
                self._ready.setdefault(self._bucket_of[pending.key], WeakValueDictionary())[pending.key] = pending
        while not self.stopped and self._next < len(self._sizes):
            ready = self._ready.get(self._next, {})
            if len(ready) < self._sizes[self._next]:
                return
            self._next += 1
            del self._ready[self._next - 1]
            yield self._next - 1, sorted(ready.values(), key=lambda pending: pending.order)

    def buckets(self, tensors: Iterable[PendingTensor]) -> list[tuple[int, list[PendingTensor]]]:
        """Tensors of the plan by bucket, in order of the buckets. Within a bucket they keep their order."""
        found: dict[int, list[PendingTensor]] = {}
        for pending in tensors:
            found.setdefault(self._bucket_of[pending.key], []).append(pending)
        return sorted(found.items())
