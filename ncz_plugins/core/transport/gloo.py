"""Frames between the ranks of one torch.distributed process group, in host memory, carried by gloo.

Only a frame's header tells how large the frame is. Gloo can receive less than there is memory for, but if more comes
than fits, it ends the process before any of it is written. So receives are posted ahead, each with a buffer for the
largest frame of the call, and a frame leaves as soon as its sender has it, without a message before it.
"""

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

from ...kernels.format import HEADER, HEADER_BYTES, MAGIC
from ..errors import FrameError, PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span, transfer
from .base import Agreement, FrameStream, Transport, Work, peer_errors
from .link_speed import gloo_link_gbps
from .plain import TorchCollectives

_FRAME_TAG, _AGREEMENT_TAG = 2, 3
# Up to so many ranks, each sends all others what is to be agreed on. More ranks send partial maxima round a ring: fewer
# bytes, but many more messages one after another.
_SEND_TO_ALL_RANKS = 16
# Receives that are posted at one time, in bytes for each peer. A sender waits until a receive is posted, and a receiver
# posts none while it is busy coding.
_AHEAD_BYTES = 32 << 20

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

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """See `Transport.start_max`."""
        with peer_errors("agreeing with the other ranks"):
            if self.world_size > _SEND_TO_ALL_RANKS:
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
                return GlooAgreement(tensor, [], [self.track(self.group.allreduce([tensor], options))], counters)
            peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
            received = [torch.empty_like(tensor) for _ in peers]
            mine = tensor.clone()  # what is being sent must not change
            works = [self.receive(each, peer, _AGREEMENT_TAG) for each, peer in zip(received, peers)]
            works += [self.send(mine, peer, _AGREEMENT_TAG) for peer in peers]
            counters.wire_bytes += tensor.nbytes * len(peers)
            return GlooAgreement(tensor, received, works, counters)

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
        # Gloo's thread may be reading into the buffer of a receive right now. The work holds that memory, and to
        # destroy the work is to wait until gloo lets go of it; gloo never touches it again. So the memory can't be
        # given to somebody else too early.
        for tracked in under_way:
            tracked.drop(self._closed)
        groups.clear()

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


class GlooTransport(Transport):
    """Frames, agreements and plain collectives for tensors in host memory.

    Args:
        connections: nobody else sends through them but who shares them with this transport for other tags, see
            NcclTransport. They are closed with this transport.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self.rank = connections.rank
        self.world_size = connections.world_size
        self.link_gbps = gloo_link_gbps()
        self.plain = TorchCollectives(lambda: connections.group, connections.track)
        self._buffers: list[Tensor] = []  # what receives were posted with, for the next call: fresh pages cost time

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[GlooStream]:
        return [
            GlooStream(self._connections, self._buffers, to, source, incoming, frame_capacity, counters)
            for to, source in peers
        ]

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        return self._connections.start_max(tensor, counters)

    def close(self) -> None:
        self._connections.close()

    def abort(self, error: BaseException) -> None:
        self._connections.close(error)


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


class GlooStream(FrameStream):
    """Frames to one peer and from one peer during one collective, over gloo.

    Args:
        buffers: memory to take and to give back, of any sizes.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(
        self,
        connections: Connections,
        buffers: list[Tensor],
        to: int,
        source: int,
        incoming: int,
        frame_capacity: int,
        counters: Counters,
    ):
        self._connections = connections
        self._buffers = buffers
        self.to = to
        self.source = source
        self._due = incoming  # frames for which no receive is posted yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[Work, Tensor]] = []
        self._frames: deque[tuple[Work, Tensor]] = deque()
        for _ in range(min(max(2, _AHEAD_BYTES // frame_capacity), incoming)):
            buffer = buffers.pop() if buffers else torch.empty(0, dtype=torch.uint8)
            self._post(buffer if buffer.numel() >= frame_capacity else torch.empty(frame_capacity, dtype=torch.uint8))

    def send(self, frame: Tensor) -> None:
        with span("send", frame.nbytes), peer_errors(f"sending to rank {self.to}"):
            work = self._connections.send(frame, self.to, _FRAME_TAG)
        self._sending.append((transfer(work, f"sending to rank {self.to}", "frame", lambda: frame.nbytes), frame))
        self._counters.wire_bytes += frame.nbytes

    def exchange(self, frame: Tensor) -> None:
        self.send(frame)

    def receive(self) -> Tensor:
        work, buffer = self._frames.popleft()
        with span("wait", 0, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        frame = buffer[: self._size(buffer)].clone()  # most frames are much smaller than the largest possible one
        buffer[:HEADER_BYTES] = 0  # so that nobody takes this frame for the next one
        if self._due:
            self._post(buffer)
        else:
            self._buffers.append(buffer)
        return frame

    def finish(self) -> None:
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _post(self, buffer: Tensor) -> None:
        """Start to receive one more frame."""
        self._due -= 1
        with peer_errors(f"receiving from rank {self.source}"):
            work = self._connections.receive(buffer[: self._capacity], self.source, _FRAME_TAG)
        work = transfer(work, f"receiving from rank {self.source}", "frame", lambda: self._size(buffer))
        self._frames.append((work, buffer))

    def _size(self, buffer: Tensor) -> int:
        """The bytes of the frame that came. Its header is from the network, so it is checked before it is believed."""
        magic, *_, payload_bytes, _, _ = HEADER.unpack_from(buffer.numpy())
        size = HEADER_BYTES + payload_bytes
        if magic != MAGIC or size > self._capacity:
            raise FrameError(
                f"rank {self.source} sent a frame of {size} bytes with magic {magic:#x}; at most "
                f"{self._capacity} bytes and {MAGIC:#x} are possible for this call. "
                "All ranks must run the same version of ncz_plugins."
            )
        return size
