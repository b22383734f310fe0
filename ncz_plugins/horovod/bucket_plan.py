"""Which gradients of an optimizer are reduced together: the same buckets on all ranks, in an order that all know.

Ranks get their gradients in orders of their own. A plan sets one beforehand, so that a bucket can be reduced as soon as
it is complete, while the backward pass goes on. It depends on nothing but the parameters: a run that is resumed has the
same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakValueDictionary

from ..core.runtime.handle import Handle
from .pending import PendingTensor

BUCKET_BYTES = (
    16 << 20
)  # few enough that most of a model is sent before its backward pass ends, and worth their latency


class BucketPlan:
    """Buckets of neighbouring gradients, and how far they are in the training step that is under way.

    Args:
        tensors: all that a step reduces.
        positions: of parameters in their optimizer, by name. A backward pass comes to them in about the reverse order,
            so that is the order of the buckets. Empty: all tensors are one bucket.

    Attributes:
        under_way: the handles of those of this step's buckets that were begun before its end.
        stopped: whether nothing more is reduced before the end of this step.
    """

    def __init__(self, tensors: Iterable[PendingTensor], positions: Mapping[str, int]):
        self._bucket_of: dict[tuple, int] = {}
        self._sizes: list[int] = []  # of buckets, in tensors
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
        """Be ready for another step."""
        # Weak, as a tensor whose handle was dropped must not complete a bucket of the next backward pass.
        self._ready: dict[int, WeakValueDictionary[tuple, PendingTensor]] = {}
        self._next = 0
        self.stopped = False
        self.under_way: list[Handle] = []

    def stop(self) -> None:
        """Reduce nothing more before the end of this step."""
        self.stopped = True

    def bucket_of(self, pending: PendingTensor) -> int:
        """The number of the bucket that has one of the tensors that it covers."""
        return self._bucket_of[pending.key]

    def join(self) -> None:
        """Make one bucket of all, and reduce nothing more before the end of this step."""
        self._bucket_of = dict.fromkeys(self._bucket_of, 0)
        self._sizes = [len(self._bucket_of)]
        self.stop()

    def wait(self) -> None:
        """Return once nothing is under way. Raises what went wrong first; what came after it was left."""
        try:
            for handle in self.under_way:
                handle.wait()
        finally:
            self.stop()  # what is under way still, after an error

    def covers(self, tensors: Iterable[PendingTensor]) -> bool:
        """Whether it was made for these."""
        return {pending.key for pending in tensors} == self._bucket_of.keys()

    def complete(self, tensors: Iterable[PendingTensor]) -> Iterator[tuple[int, list[PendingTensor]]]:
        """Take note of tensors that are ready. Yield each bucket that is complete now: its number and its tensors."""
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
        """Some of the tensors that it covers, by their buckets. Within a bucket their order stays."""
        found: dict[int, list[PendingTensor]] = {}
        for pending in tensors:
            found.setdefault(self._bucket_of[pending.key], []).append(pending)
        return sorted(found.items())
