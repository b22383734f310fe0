"""Gloo's connections of our own between the ranks of one group, which this module alone owns and closes."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .base import Agreement, Work, peer_errors

_AGREEMENT_TAG, _OPENING_TAG = 3, 5  # of messages; gloo.py, nccl.py and plain.py have the others
# Up to so many ranks, each sends all others what is to be agreed on. More ranks send partial maxima round a ring: fewer
# bytes, but many more messages one after another.
_SEND_TO_ALL_RANKS = 16
_OPENING_BYTES = 128 << 10  # of values that may travel with a comparison, to each rank
_NUMBERS_BYTES = 1 << 10  # at most, that a comparison takes

_kept_in_forks: weakref.WeakSet = weakref.WeakSet()


class Connections:
    """Gloo's connections of our own between ranks that meet at `store`: to each peer one for each direction.

    One for both directions would be slow. Gloo locks a connection to send; meanwhile the thread that reads from it
    spins, and on few cores it takes the time from the sender. And what a rank tells about its receives, without which
    nothing is sent, would queue behind the frames that go the same way.

    This object is the only holder of gloo's process groups and of the works under way in them, since gloo closes a
    connection with the last reference to its group and to the works in it; its `abort` does nothing. So `close` really
    closes the sockets, whatever streams, messages or frames of a traceback others still hold. For that to stay true, no
    function may give a group or a work of torch.distributed a name of its own while it calls something that can fail.

    Attributes:
        opening_bytes: how many bytes of values each message of `open` may hold.

    Raises UnsupportedError where torch has no gloo, and PeerError if the other ranks don't come.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        # torch.distributed.new_group will not do: it needs every rank of the world, or it derives the group's name from
        # how many groups a rank is in, which may differ between ranks.
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "torch was built without gloo, which carries sizes, agreements and compressed CPU tensors"
            )
        self.rank = rank
        self.world_size = world_size
        self.opening_bytes = _OPENING_BYTES
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._openings: deque[list[Tensor]] = deque()
        self._posted: list[Work] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way: set[TrackedWork] = set()
        self._closed: str | None = None  # why, in words
        with peer_errors("connecting to the other ranks"):
            self._upwards, self._downwards = (
                dist.ProcessGroupGloo(dist.PrefixStore(direction, store), rank, world_size, timeout)
                for direction in ("upwards", "downwards")
            )
        keep_in_forks(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """A process group for collectives, for use in the same expression. Raises PeerError once it is closed."""
        return self._group(upwards=True)

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Start to send a tensor in host memory, which must not change meanwhile."""
        return self.track(self._group(upwards=to > self.rank).send([tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start to receive into a tensor in host memory, which must be large enough for what comes."""
        return self.track(self._group(upwards=source < self.rank).recv([tensor], source, tag))

    @property
    def compares_directly(self) -> bool:
        """Whether `open` may be called: each rank sends its messages to all others."""
        return self.world_size <= _SEND_TO_ALL_RANKS

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """See `Transport.start_max`."""
        with peer_errors("agreeing with the other ranks"):
            if not self.compares_directly:
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
                return GlooAgreement(tensor, [], [self.track(self.group.allreduce([tensor], options))], counters)
            mine = tensor.clone()  # what is being sent must not change
            received = [torch.empty_like(tensor) for _ in self._peers]
            works = self._exchange(received, [mine] * self.world_size)
            counters.wire_bytes += tensor.nbytes * len(self._peers)
            return GlooAgreement(tensor, received, works, counters)

    def start_comparison(self, tensor: Tensor, counters: Counters) -> Agreement:
        """As `start_max`, of a tensor with which a call begins: in place of it a peer may `open` another call."""
        if not self.compares_directly:
            return self.start_max(tensor, counters)
        with peer_errors("comparing calls with the other ranks"):
            mine = tensor.clone().view(torch.uint8)
            received, works = self._exchange_openings([mine] * self.world_size)
            counters.wire_bytes += tensor.nbytes * len(self._peers)
            numbers = [buffer[: tensor.nbytes].view(tensor.dtype) for buffer in received]
            return GlooAgreement(tensor, numbers, works, counters)

    def open(self, tensor: Tensor, outgoing: list[Tensor]) -> list[Tensor | None]:
        """Replace `tensor` by its element-wise maximum over ranks, and send each rank some values in the same message.

        Args:
            tensor: with which a call begins, as for `start_comparison`.
            outgoing: for each rank the values that it gets, of any dtype, at most `opening_bytes`.

        Returns: from each rank what came after its numbers, uint8, and more memory; None from this one. It is valid
        until the next call begins. What peers sent is not what this rank expects if the maximum shows that they differ.
        """
        header = tensor.view(torch.uint8)
        if all(values is outgoing[0] for values in outgoing):
            messages = [torch.cat([header, outgoing[0].view(torch.uint8)])] * self.world_size
        else:
            messages = [torch.cat([header, values.view(torch.uint8)]) for values in outgoing]
        received, works = self._exchange_openings(messages)
        for work in works:
            work.wait()
        for buffer in received:
            torch.maximum(tensor, buffer[: tensor.nbytes].view(tensor.dtype), out=tensor)
        values = [buffer[tensor.nbytes :] for buffer in received]
        return [*values[: self.rank], None, *values[self.rank :]]

    def exchange_known(self, mine: Tensor, theirs: list[Tensor]) -> None:
        """Send `mine` to all ranks, and fill theirs[rank] with what each of them sends. All sizes were compared."""
        for work in self._exchange([theirs[peer] for peer in self._peers], [mine] * self.world_size):
            work.wait()

    def track(self, work: dist.Work) -> TrackedWork:
        """Keep account of a work that was just started, until it has been waited for."""
        tracked = TrackedWork(self, work)
        with self._lock:
            if self._closed is None:
                self._under_way.add(tracked)
                return tracked
        tracked.drop(self._closed)  # closed by another thread meanwhile
        return tracked

    def forget(self, tracked: TrackedWork) -> None:
        """A work is over."""
        with self._lock:
            self._under_way.discard(tracked)

    def close(self, error: BaseException | None = None) -> None:
        """Close the sockets, so that a peer that still waits for this rank gets an error at once.

        Safe to call twice and from any thread. A work that another thread is waiting for keeps the sockets open until
        its wait ends, and so does a plain collective that is under way. In a fork nothing happens, since the
        connections belong to its parent.

        Args:
            error: what went wrong, which whoever uses the connections later is told.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "these connections are closed" + (f" after {error!r}" if error else "")
            groups, self._upwards, self._downwards = [self._upwards, self._downwards], None, None
            under_way, self._under_way = self._under_way, set()
            self._posted = []
        # Gloo's thread may be reading into the buffer of a receive right now. The work holds that memory, and to
        # destroy the work is to wait until gloo lets go of it; gloo never touches it again. So the memory can't be
        # given to somebody else too early.
        for tracked in under_way:
            tracked.drop(self._closed)
        groups.clear()

    def _exchange(self, buffers: list[Tensor], messages: list[Tensor]) -> list[Work]:
        """Start to receive into `buffers`, in the order of `_peers`, and to send messages[peer] to each of them."""
        works = [self.receive(buffer, peer, _AGREEMENT_TAG) for buffer, peer in zip(buffers, self._peers)]
        return works + [self.send(messages[peer], peer, _AGREEMENT_TAG) for peer in self._peers]

    def _exchange_openings(self, messages: list[Tensor]) -> tuple[list[Tensor], list[Work]]:
        """Start to send messages[peer] to each peer, with which a call begins, and to receive theirs.

        Gloo sends nothing before it knows of a receive at the other side. So those of the next call are posted now, and
        its messages will leave at once. Two sets of buffers take turns.

        Returns: what peers' messages come into, in the order of `_peers`; and what to wait for.
        """
        if not self._openings:
            nbytes = _NUMBERS_BYTES + self.opening_bytes  # gloo bears no message that is longer
            self._openings += ([torch.empty(nbytes, dtype=torch.uint8) for _ in self._peers] for _ in range(2))
            self._post_openings()
        received, works = self._openings[0], self._posted
        works = works + [self.send(messages[peer], peer, _OPENING_TAG) for peer in self._peers]
        self._openings.rotate()
        self._post_openings()
        return received, works

    def _post_openings(self) -> None:
        buffers = zip(self._openings[0], self._peers)
        self._posted = [self.receive(buffer, peer, _OPENING_TAG) for buffer, peer in buffers]

    def _group(self, upwards: bool) -> dist.ProcessGroup:
        """The process group that carries messages from lower to higher ranks, or from higher to lower ones."""
        group = self._upwards if upwards else self._downwards
        if group is None:
            raise PeerError(self._closed)
        return group


class TrackedWork:
    """A work of gloo's that its `Connections` can take away: everybody else holds it through this object."""

    __slots__ = ("_connections", "_work")

    def __init__(self, connections: Connections, work: dist.Work):
        self._connections = connections
        self._work: Work = work

    def wait(self, *timeout) -> bool:
        """Return True once it is over. Raises RuntimeError if it failed, PeerError if the connections were closed."""
        self._work.wait(*timeout)  # which has no name here, see `Connections`
        self._connections.forget(self)
        self._work = _over
        return True

    def is_completed(self) -> bool:
        """Whether it is over, or was taken away."""
        return self._work.is_completed()

    def drop(self, reason: str) -> None:
        """Let go of gloo's work: the connections are closed."""
        self._work = _Ended(reason)


class _Ended:
    """In place of a work of gloo's that was let go: it is over, or for some reason never will be."""

    def __init__(self, reason: str | None = None):
        self._reason = reason

    def wait(self, *timeout) -> bool:
        if self._reason is not None:
            raise PeerError(self._reason)
        return True

    def is_completed(self) -> bool:
        return True


_over = _Ended()


def keep_in_forks(owner: object) -> None:
    """Keep `owner`, and the process groups that it holds, alive for ever in a fork of this process.

    The end of a process group waits for its threads, which a fork does not have.
    """
    _kept_in_forks.add(owner)


def _keep_owners() -> None:
    for owner in _kept_in_forks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_owners)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out that the user gave the group, or torch's default where its backend does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout


class GlooAgreement(Agreement):
    """An element-wise maximum over ranks, under way over gloo.

    Args:
        tensor: where the result goes.
        received: what comes from other ranks, of which the maximum with `tensor` is taken.
        works: what to wait for.
    """

    def __init__(self, tensor: Tensor, received: list[Tensor], works: list[Work], counters: Counters):
        self._tensor = tensor
        self._received = received
        self._works = works
        self._counters = counters

    def wait(self) -> None:
        with span("wait", self._tensor.nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            for work in self._works:
                work.wait()
        for theirs in self._received:
            torch.maximum(self._tensor, theirs, out=self._tensor)
