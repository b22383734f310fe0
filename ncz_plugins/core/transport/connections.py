"""Connections between the ranks of one group.

Frames and short messages go through two meshes of our own sockets, see mesh.py. Up to 16 ranks are all connected with
each other. Among more, a rank is connected with about 2 log2(n) others, over which they agree, and with those that it
exchanges frames with, once it does. Large plain collectives go through gloo, which the first of them connects. There is
no mesh if gloo is told to encrypt, or a rank has no address; then everything goes through gloo.

What connects later reads the store by a connection of its own: another thread may wait in the one of torch.distributed
for a rank that waits for this one. Of gloo a rank has n - 1 sockets and a thread, or without a mesh twice as many. All
connections of a process share its listener, with 4 descriptors and a thread. For messages in one direction between two
ranks there is one socket and no gloo, if there is a mesh.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError, UnsupportedError
from ..runtime.process import keep_in_forks
from ..runtime.statistics import Counters
from .addresses import gloo_interfaces
from .agreements import agree, compare, memory_of, neighbors_of
from .base import GeneratorWork, Work, peer_errors
from .comparison import RankComparison
from .descriptors import shortage_of_descriptors
from .endpoint import Endpoint
from .handshake import require_all_able, store_of_own
from .mesh import Incoming, Mesh, Outgoing, SparseMesh, connects_all, open_mesh

_MOST_TOLD_WHY = 64  # connected ranks that hear why this one gives up; those that agreements take come first
_GLOO_DEVICE_DESCRIPTORS = 4  # two ends of a pipe, an epoll instance, a listener

# Gloo's devices of this process, by `_device_key`.
_known_gloo_devices: weakref.WeakValueDictionary[tuple[int, str, str], object] = weakref.WeakValueDictionary()


class Connections:
    """Owner of the connections between ranks that meet at `store`.

    There are two meshes, so that agreements do not queue behind frames. Without a mesh, two process groups of gloo
    carry frames, one for each direction, because one for both is slow: gloo locks a connection to send, and its
    receiving thread spins on the lock, which takes time from the sender on few cores. Announcements of receives,
    without which nothing is sent, would also queue behind frames in the same direction.

    Gloo closes a connection when the last reference to its process group and to its works ends; its `abort` does
    nothing. So only this object holds process groups and works under way, and `close` really closes the sockets,
    whatever streams or tracebacks others hold. Therefore no function may keep a process group or work of
    torch.distributed in a variable while it calls something that can fail.

    Args:
        store: a store that nothing else uses under the same prefix.
        timeout: how long to wait for a peer, when connecting and in each operation.
        channels: TCP connections with each rank for frames, if there is a mesh.
        names: what messages call each rank; None: its number here.
        one_way: for two ranks of which one sends to the other: one mesh carries all, as agreements and frames take
            turns, and if there is one there are no process groups. The value waits until the store has some keys.

    Attributes:
        mesh: the mesh for short messages between all ranks; None if they are not all connected with each other.
        neighbors: the mesh for short messages between those ranks that agreements take; None if there is none.
        frames: the mesh for frames; None if there is none.
        has_no_groups: whether the mesh carries all, and there is no process group.

    Raises UnsupportedError if torch has no gloo or this process may not open enough descriptors, and PeerError if the
    other ranks don't come or can't connect.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        channels: int = 1,
        names: Sequence[int] | None = None,
        one_way: Callable[[dist.Store, list[str]], None] | None = None,
    ):
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "torch was built without gloo, which carries sizes, agreements and compressed CPU tensors"
            )
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way: set[TrackedWork] = set()
        self._closed: str | None = None  # why the connections were closed
        self.mesh = self.neighbors = self.frames = self._endpoint = None
        self._upwards = self._downwards = None
        self._devices: list = []
        self.has_no_groups = False
        try:
            if one_way is not None:
                messages = dist.PrefixStore("mesh of frames", store)
                self.mesh = self.frames = open_mesh(messages, rank, world_size, timeout, channels, names, one_way)
                self.has_no_groups = self.mesh is not None
                if self.has_no_groups:
                    self._store = None  # which may have a connection of its own
            elif connects_all(world_size):
                self._require_descriptors("descriptors", (world_size - 1) * (1 + channels))
                self.mesh = open_mesh(dist.PrefixStore("mesh", store), rank, world_size, timeout, names=names)
                frames = dist.PrefixStore("mesh of frames", store)
                self.frames = open_mesh(frames, rank, world_size, timeout, channels, names)
            else:
                self._open_sparse(channels, names)
            if self.frames is None:
                self._open_groups(both_ways=True)
        except BaseException as error:
            self._say_why(error)
            self._close_meshes("connecting failed")
            raise
        keep_in_forks(self)

    def _open_sparse(self, channels: int, names: Sequence[int] | None) -> None:
        """Open meshes in which a rank is connected with few others. All ranks must call this."""
        self._store = store_of_own(self._store)  # addresses are read later, while another thread may wait in the store
        self._endpoint = Endpoint(dist.PrefixStore("mesh", self._store), self.rank, self._timeout, names)
        agreeing = neighbors_of(self.rank, self.world_size)
        needed = 1 + len(agreeing) * (1 + channels)  # with the listener, and about as many for frames
        if not self._require_descriptors("descriptors", needed, self._endpoint.listens):
            self._endpoint.close()
        else:
            self.neighbors = SparseMesh(self._endpoint, range(1), self._timeout)
            self.frames = SparseMesh(self._endpoint, range(1, 1 + channels), self._timeout)
            self.neighbors.connect(agreeing)

    def _open_groups(self, both_ways: bool) -> None:
        """Open the process groups of gloo. All ranks must call this.

        Args:
            both_ways: whether frames need one for each direction.
        """
        self._require_descriptors("descriptors of gloo", _descriptors_of_gloo(self.world_size, 1 + both_ways))
        # Not torch.distributed.new_group: it needs every rank of the world, or names the group by the number of
        # groups that a rank is in, which may differ between ranks.
        with peer_errors("connecting to the other ranks"):
            self._devices = _gloo_devices()
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = self._devices, 1, self._timeout
            place = self.rank, self.world_size, options
            self._upwards = dist.ProcessGroupGloo(self._part_of_store("upwards"), *place)
            self._downwards = self._upwards
            if both_ways:
                self._downwards = dist.ProcessGroupGloo(self._part_of_store("downwards"), *place)
            # A rank that closes while others still connect would make them fail, though it had nothing more to do.
            self._group(upwards=False).barrier().wait()
        with self._lock:
            if self._closed is not None:  # another thread has closed the connections meanwhile
                self._upwards = self._downwards = None

    def _require_descriptors(self, meeting: str, count: int, listens: bool = True) -> bool:
        """See `require_all_able`: whether all ranks may open so many descriptors, and whether all of them listen."""
        refusal = shortage_of_descriptors(count, self.world_size)
        place = self._part_of_store(meeting), self.rank, self.world_size
        return require_all_able(*place, refusal, self._timeout, listens)

    def _part_of_store(self, prefix: str) -> dist.Store:
        store = self._store  # which `close` lets go of
        if store is None:
            raise PeerError(self._closed)
        return dist.PrefixStore(prefix, store)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for collectives. Use it in the same expression. Raises PeerError once it is closed.

        The first use connects all ranks: they must make the same call.
        """
        if self._upwards is None and self._closed is None:
            if self._endpoint is None:  # else it has a connection of its own already
                self._store = store_of_own(self._store)  # another thread may wait in this one, for ranks that wait here
            self._open_groups(both_ways=False)
        return self._group(upwards=True)

    def connect(self, peers: Iterable[int]) -> None:
        """Connect for `send` and `receive` with these ranks, which must do the same."""
        if self.neighbors is not None:
            self.neighbors.connect(peers)

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Start to send a tensor in host memory, which must not change before the work is over.

        Between two ranks messages arrive in the order in which they were sent, and must be received in that order.

        Args:
            tag: number of such messages, for gloo.
        """
        if (mesh := self.mesh or self.neighbors) is not None:
            return _MessageWork(mesh, mesh.send(to, memory_of(tensor.detach())))
        return self.track(self._group(upwards=to > self.rank).send([tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start to receive into a contiguous tensor in host memory, which has the size of the message: see `send`."""
        if (mesh := self.mesh or self.neighbors) is not None:
            nbytes, memory = tensor.nbytes, memory_of(tensor.detach())
            return _MessageWork(mesh, mesh.receive(source, nbytes, nbytes, memory=memory))
        return self.track(self._group(upwards=source < self.rank).recv([tensor], source, tag))

    def start_max(self, tensor: Tensor, counters: Counters) -> Work:
        """See `Transport.start_max`."""
        return GeneratorWork(agree(self, tensor, counters))

    def start_comparison(self, comparison: RankComparison, counters: Counters, values: Tensor | None = None) -> Work:
        """See `Transport.start_comparison`. `values` need a mesh. Other ranks may make small calls instead."""
        if self.mesh is None and self.neighbors is None:
            return self.start_max(comparison.tensor, counters)
        return GeneratorWork(compare(self, comparison, values, counters))

    def track(self, work: dist.Work) -> TrackedWork:
        """Hold a work that was just started, until it has been waited for. Returns its replacement for callers."""
        tracked = TrackedWork(self, work)
        with self._lock:
            if self._closed is None:
                self._under_way.add(tracked)
                return tracked
        tracked.drop(self._closed)  # another thread has closed the connections
        return tracked

    def forget(self, tracked: TrackedWork) -> None:
        """Let go of a work that is over."""
        with self._lock:
            self._under_way.discard(tracked)

    def close(self, error: BaseException | None = None) -> None:
        """Close the sockets, so that peers that still wait for this rank get an error at once.

        Safe to call twice, and from any thread. A work that another thread waits for keeps the sockets open until its
        wait ends, and so does a plain collective that is under way. In a fork this does nothing, as the connections
        belong to its parent.

        Args:
            error: the error that happened, named by errors of later uses; None: there was none.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "these connections are closed" + (f" after {error!r}" if error else "")
            groups, self._upwards, self._downwards = [self._upwards, self._downwards], None, None
            under_way, self._under_way = self._under_way, set()
            self._store = None  # which may have a connection, or be the server, of these ranks only
        if error is not None:
            self._say_why(error)
        self._close_meshes(self._closed)
        # Gloo's thread may be writing to the buffer of a receive right now. The work holds that memory, and destroying
        # the work waits until gloo is done with it. So the memory can't be reused too early.
        for tracked in under_way:
            tracked.drop(self._closed)
        groups.clear()
        self._devices = []

    def _say_why(self, error: BaseException) -> None:
        """Tell ranks that this one has called, was to call, or was called by, what happened first.

        That need not be an error of this rank.
        """
        if self.neighbors is None:
            return  # where all are connected with each other they see it
        own = f"{error}"
        if not (isinstance(error, PeerError) and own.startswith("rank ")):  # which says whose fault it is
            own = f"rank {self._endpoint.names_of([self.rank])} has failed: {error!r}"
        peers = dict.fromkeys([*neighbors_of(self.rank, self.world_size), *self.frames.ranks, *self._endpoint.known])
        self._endpoint.tell(self._endpoint.cause or own, list(peers)[:_MOST_TOLD_WHY])

    def _close_meshes(self, reason: str) -> None:
        for each in filter(None, (self.mesh, self.neighbors, self.frames, self._endpoint)):
            each.close(reason)

    def _group(self, upwards: bool) -> dist.ProcessGroup:
        """The process group that carries messages from lower to higher ranks, or from higher to lower ones."""
        group = self._upwards if upwards else self._downwards
        if group is None:
            raise PeerError(self._closed)
        return group


class TrackedWork:
    """Holder of one of gloo's works, for callers. `Connections` can take the work away: see there."""

    __slots__ = ("_connections", "_work")

    def __init__(self, connections: Connections, work: dist.Work):
        self._connections = connections
        self._work: Work = work

    def wait(self, *timeout) -> bool:
        """Return True once the work is over.

        Raises RuntimeError if it failed, and PeerError if the connections were closed.
        """
        self._work.wait(*timeout)  # the work must not get a name here: see `Connections`
        self._connections.forget(self)
        self._work = _over
        return True

    def drop(self, reason: str) -> None:
        """Let go of gloo's work. Later waits raise PeerError with this reason."""
        self._work = _Ended(reason)


class _Ended:
    """Replacement of one of gloo's works that is over, or was taken away for a reason."""

    def __init__(self, reason: str | None = None):
        self._reason = reason

    def wait(self, *timeout) -> bool:
        if self._reason is not None:
            raise PeerError(self._reason)
        return True


_over = _Ended()


class _MessageWork(NamedTuple):
    """Work of a message over a mesh."""

    mesh: Mesh
    message: Outgoing | Incoming

    def wait(self, *timeout) -> bool:
        self.mesh.finish([self.message])
        return True


def _descriptors_of_gloo(world_size: int, groups: int) -> int:
    """The number of descriptors that process groups of gloo take between so many ranks."""
    interfaces = gloo_interfaces()
    own = sum(_device_key(interface) not in _known_gloo_devices for interface in interfaces)
    return groups * (world_size - 1) * len(interfaces) + _GLOO_DEVICE_DESCRIPTORS * own


def _gloo_devices() -> list:
    """Gloo's devices, its listeners and threads, one for each interface. All process groups share them.

    Torch would make new ones for each group. A device ends with its last reference, so users must hold it. A fork makes
    its own, as it has none of its parent's threads.
    """
    devices = []
    for interface in gloo_interfaces():
        device = _known_gloo_devices.get(_device_key(interface))
        if device is None:
            create = dist.ProcessGroupGloo
            device = create.create_device(interface=interface) if interface else create.create_default_device()
            _known_gloo_devices[_device_key(interface)] = device
        devices.append(device)
    return devices


def _device_key(interface: str) -> tuple[int, str, str]:
    """The key of a device in `_known_gloo_devices`."""
    return os.getpid(), interface, os.environ.get("GLOO_DEVICE_TRANSPORT", "")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out of a process group; torch's default if the group's backend does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout
