"""The connections between the ranks of one group, which this module alone owns and closes.

Plain collectives go through gloo. Frames and short messages go through sockets of our own, but where there are none:
between more than 16 ranks, and where gloo is told to encrypt.

Between n ranks a rank has 3 (n - 1) sockets and one thread of gloo's; or 2 (n - 1) sockets and two threads, all of
gloo's. All connections of a process share what gloo listens with: 4 descriptors and a thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .addresses import gloo_interfaces
from .base import Agreement, Work, peer_errors
from .comparison import RankComparison
from .descriptors import shortage_of_descriptors
from .handshake import require_all_able
from .mesh import MOST_RANKS, Exchange, Mesh, Place, open_mesh

_OPENING_BYTES = 16 << 20  # of values that may travel with a comparison, to each rank
_MOST_TOLD_BYTES = 256 << 10  # that a rank sends so that all agree in one round; of more, it sends parts, in two rounds
_MOST_SPREAD_BYTES = 64 << 10  # that a rank sends so that all agree in few rounds; gloo's ring has more, and sends less
_FIRST_SPREAD_TAG = 16  # of messages, one for each round; gloo.py, nccl.py and plain.py have the others

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

_DEVICE_DESCRIPTORS = 4  # of a device of gloo's: two ends of a pipe, an epoll instance, a listener

_kept_in_forks: weakref.WeakSet = weakref.WeakSet()
_gloos_devices: weakref.WeakValueDictionary[tuple[int, str, str], object] = weakref.WeakValueDictionary()


class Connections:
    """Connections of our own between ranks that meet at `store`.

    There are two meshes: what ranks agree on while frames are under way must not queue behind these. Where gloo carries
    the frames, it has two connections with each peer, one for each direction. One for both would be slow. Gloo locks a
    connection to send; meanwhile the thread that reads from it spins, and on few cores it takes the time from the
    sender. And what a rank tells about its receives, without which nothing is sent, would queue behind the frames that
    go the same way.

    This object is the only holder of gloo's process groups and of the works under way in them, since gloo closes a
    connection with the last reference to its group and to the works in it; its `abort` does nothing. So `close` really
    closes the sockets, whatever streams, messages or frames of a traceback others still hold. For that to stay true, no
    function may give a group or a work of torch.distributed a name of its own while it calls something that can fail.

    Args:
        channels: how many connections with each rank carry frames, where no gloo does.

    Attributes:
        opening_bytes: how many bytes of values each message of `open` may hold.
        mesh: what carries short messages between all ranks, as `open` and `exchange` do; None where there is none.
        frames: what carries frames; None where there is no `mesh`.

    Raises UnsupportedError where torch has no gloo, or where this process may not open as many descriptors as it takes,
    and PeerError if the other ranks don't come, or can't connect.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, channels: int = 1):
        # torch.distributed.new_group will not do: it needs every rank of the world, or it derives the group's name from
        # how many groups a rank is in, which may differ between ranks.
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "torch was built without gloo, which carries sizes, agreements and compressed CPU tensors"
            )
        self.rank = rank
        self.world_size = world_size
        self.opening_bytes = _OPENING_BYTES
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way: set[TrackedWork] = set()
        self._closed: str | None = None  # why, in words
        self.mesh = self.frames = None
        refusal = shortage_of_descriptors(_descriptors(world_size, channels), world_size)
        require_all_able(dist.PrefixStore("descriptors", store), rank, world_size, refusal, timeout)
        try:
            self.mesh = open_mesh(dist.PrefixStore("mesh", store), rank, world_size, timeout)
            self.frames = open_mesh(dist.PrefixStore("mesh of frames", store), rank, world_size, timeout, channels)
            with peer_errors("connecting to the other ranks"):
                self._devices = _gloo_devices()
                options = dist.ProcessGroupGloo._Options()
                options._devices, options._threads, options._timeout = self._devices, 1, timeout
                self._upwards = dist.ProcessGroupGloo(dist.PrefixStore("upwards", store), rank, world_size, options)
                self._downwards = self._upwards
                if self.frames is None:
                    self._downwards = dist.ProcessGroupGloo(
                        dist.PrefixStore("downwards", store), rank, world_size, options
                    )
        except BaseException:
            self._close_meshes("connecting failed")
            raise
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
        way = way_to_agree(self.world_size, tensor.nbytes, self.mesh is not None)
        if way is WayToAgree.TOLD:
            exchange = self.mesh.start([[memory_of(tensor)]] * self.world_size, tensor.nbytes, tensor.nbytes)
            counters.wire_bytes += tensor.nbytes * (self.world_size - 1)
            return MeshAgreement(tensor, exchange, counters)
        if way is WayToAgree.IN_PARTS:
            return PartedAgreement(self.mesh, self.rank, self.world_size, tensor, counters)
        if way is WayToAgree.SPREAD:
            return SpreadAgreement(self, tensor, counters)
        with peer_errors("agreeing with the other ranks"):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
            return GlooAgreement(self.track(self.group.allreduce([tensor], options)), tensor.nbytes, counters)

    def start_comparison(
        self, comparison: RankComparison, counters: Counters, values: Tensor | None = None
    ) -> Agreement:
        """See `Transport.start_comparison`; `values` only where there is a mesh. A peer may `open` another call."""
        if self.mesh is None:
            return self.start_max(comparison.tensor, counters)
        values = _NOTHING if values is None else values
        opening = self.open(comparison, [memory_of(values)] * self.world_size).receive()
        counters.wire_bytes += (len(comparison.told) + values.nbytes) * (self.world_size - 1)
        return OpeningAgreement(opening, values, counters)

    def open(self, comparison: RankComparison, outgoing: Sequence[memoryview]) -> Opening:
        """Start to send each rank what a call begins with, and behind it some values in the same message.

        Args:
            comparison: with which the call begins.
            outgoing: for each rank the values that it gets, at most `opening_bytes`.
        """
        exchange = self.mesh.tell([[comparison.told, values] for values in outgoing])
        return Opening(comparison, exchange, self.opening_bytes)

    def start_gather(self, parts: Sequence[memoryview]) -> Gather:
        """Start to send all ranks this one's part, and to receive each one's own into its place.

        Args:
            parts: the bytes of one of each rank. All sizes were compared before.
        """
        return Gather(self.mesh, self.rank, parts)

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
        self._close_meshes(self._closed)
        # Gloo's thread may be reading into the buffer of a receive right now. The work holds that memory, and to
        # destroy the work is to wait until gloo lets go of it; gloo never touches it again. So the memory can't be
        # given to somebody else too early.
        for tracked in under_way:
            tracked.drop(self._closed)
        groups.clear()
        self._devices = []

    def _close_meshes(self, reason: str) -> None:
        for mesh in filter(None, (self.mesh, self.frames)):
            mesh.close(reason)

    def _group(self, upwards: bool) -> dist.ProcessGroup:
        """The process group that carries messages from lower to higher ranks, or from higher to lower ones."""
        group = self._upwards if upwards else self._downwards
        if group is None:
            raise PeerError(self._closed)
        return group


class Opening:
    """The messages with which a call of values begins, under way.

    Args:
        comparison: with which they begin.
        most: bytes of values that may come from each rank.
    """

    def __init__(self, comparison: RankComparison, exchange: Exchange, most: int):
        self._comparison = comparison
        self._exchange = exchange
        self._head = len(comparison.told)
        self._most = most

    def receive(self, places: Sequence[memoryview | None] = ()) -> Opening:
        """Start to receive, while what this rank sends is on its way already. Called once. Returns this object.

        Args:
            places: for each rank where its values go, if it makes the same call; None: into new memory.
        """
        into = [None if place is None else Place(self._comparison.told, place) for place in places]
        self._exchange.receive(self._head, self._head + self._most, into)
        return self

    def compare(self, nbytes: int = 0) -> list[memoryview]:
        """Let `comparison` hear of all ranks, and return what `reach` does, as soon as that would."""
        received = self._exchange.reach(self._head + nbytes)
        for rank, message in zip(self._exchange.ranks, received):
            self._comparison.hear(rank, message[: self._head].tobytes())
        return self._values(received)

    def reach(self, nbytes: int) -> list[memoryview]:
        """What came from the other ranks and not to its place, in order, once so many bytes are there and have left.

        They are not what this rank expects if the ranks differ.
        """
        return self._values(self._exchange.reach(self._head + nbytes))

    def wait(self) -> list[memoryview]:
        """The same, once all has come. This rank's messages have left by then."""
        return self._values(self._exchange.wait())

    def _values(self, received: list[memoryview]) -> list[memoryview]:
        return [message[self._head :] for message in received]


class Gather:
    """Parts that ranks send each other, under way: each sends its own to all, and receives theirs where they belong."""

    def __init__(self, mesh: Mesh, rank: int, parts: Sequence[memoryview]):
        sizes = [part.nbytes for part in parts]
        places = [Place(b"", part) for part in parts]
        self._exchange = mesh.start([[parts[rank]]] * len(parts), min(sizes), max(sizes), places)

    def wait(self) -> None:
        """Return once all parts are there. Raises PeerError."""
        require_placed(self._exchange.wait())


def require_placed(received: Iterable[memoryview]) -> None:
    """Raise PeerError if something was left over that did not go to its place."""
    if any(message.nbytes for message in received):
        raise PeerError("other ranks sent parts of other sizes: all ranks must run the same version of ncz_plugins")


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


def _descriptors(world_size: int, channels: int) -> int:
    """How many descriptors connections between so many ranks take. Arguments as of `Connections`."""
    interfaces = gloo_interfaces()
    own = (world_size - 1) * (1 + channels) if world_size <= MOST_RANKS else 0
    gloos = (world_size - 1) * len(interfaces) * (1 if own else 2)
    return own + gloos + _DEVICE_DESCRIPTORS * sum(_key(interface) not in _gloos_devices for interface in interfaces)


def _gloo_devices() -> list:
    """What gloo listens and waits with, for each interface that it is to use: torch would make one for each group.

    Whoever uses them must hold them, as they end when nobody does any more. A fork makes its own: it has no threads of
    its parent's.
    """
    devices = []
    for interface in gloo_interfaces():
        device = _gloos_devices.get(_key(interface))
        if device is None:
            create = dist.ProcessGroupGloo
            device = create.create_device(interface=interface) if interface else create.create_default_device()
            _gloos_devices[_key(interface)] = device
        devices.append(device)
    return devices


def _key(interface: str) -> tuple[int, str, str]:
    """What tells the devices of this process apart."""
    return os.getpid(), interface, os.environ.get("GLOO_DEVICE_TRANSPORT", "")


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


class WayToAgree(Enum):
    """How ranks find an element-wise maximum."""

    TOLD = "each tells all others, in one round"
    IN_PARTS = "each finds that of one part, and tells it to all others, in two rounds"
    SPREAD = "each tells what it knows to one other, in as many rounds as their number has binary digits"
    RING = "in gloo's ring"


def way_to_agree(world_size: int, nbytes: float, meshed: bool) -> WayToAgree:
    """The way that ranks find a maximum over `nbytes`.

    Args:
        meshed: whether each has a connection of our own with each other one.
    """
    if meshed:
        told = world_size <= 2 or nbytes <= told_bytes(world_size)
        return WayToAgree.TOLD if told else WayToAgree.IN_PARTS
    return WayToAgree.SPREAD if nbytes * rounds_of(world_size) <= _MOST_SPREAD_BYTES else WayToAgree.RING


def told_bytes(world_size: int) -> int:
    """Up to how many bytes an agreement of more than two ranks takes one round."""
    return _MOST_TOLD_BYTES // max(1, world_size - 1)


def most_with_comparison(world_size: int, meshed: bool) -> int:
    """Up to how many bytes that ranks agree on travel with a comparison: as many as take one round anyway.

    Args:
        meshed: see `way_to_agree`.
    """
    if not meshed:
        return 0
    return _OPENING_BYTES if world_size <= 2 else told_bytes(world_size)


class GlooAgreement(Agreement):
    """An element-wise maximum over ranks that gloo's own collective finds."""

    def __init__(self, work: Work, nbytes: int, counters: Counters):
        self._work = work
        self._nbytes = nbytes
        self._counters = counters

    def wait(self) -> None:
        with span("wait", self._nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            self._work.wait()


class SpreadAgreement(Agreement):
    """An element-wise maximum over ranks, in as many rounds as the number of ranks has binary digits.

    In round k a rank tells rank + 2^k what it knows, and learns what rank - 2^k knows: the dissemination algorithm of
    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988). It may count ranks twice, which a
    maximum allows. All ranks wait for their agreements in the same order.
    """

    def __init__(self, connections: Connections, tensor: Tensor, counters: Counters):
        self._connections = connections
        self._tensor = tensor
        self._counters = counters
        self._under_way: tuple[Work, Work, Tensor, Tensor] = self._start(0)

    def wait(self) -> None:
        rounds = rounds_of(self._connections.world_size)
        with span("wait", self._tensor.nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            for number in range(1, rounds + 1):
                sending, receiving, _, received = self._under_way
                receiving.wait()
                sending.wait()
                torch.maximum(self._tensor, received, out=self._tensor)
                if number < rounds:
                    self._under_way = self._start(number)

    def _start(self, number: int) -> tuple[Work, Work, Tensor, Tensor]:
        """Begin a round. Returns what sends and receives, and the memory that they use."""
        connections, distance, tag = self._connections, 1 << number, _FIRST_SPREAD_TAG + number
        n, rank = connections.world_size, connections.rank
        sent, received = self._tensor.clone(), torch.empty_like(self._tensor)
        with peer_errors("agreeing with the other ranks"):
            receiving = connections.receive(received, (rank - distance) % n, tag)
            sending = connections.send(sent, (rank + distance) % n, tag)
        self._counters.wire_bytes += sent.nbytes
        return sending, receiving, sent, received


def rounds_of(world_size: int) -> int:
    """How many rounds it takes until every rank knows of every other, if each round doubles what they know."""
    return (world_size - 1).bit_length()


class MeshAgreement(Agreement):
    """An element-wise maximum over ranks, each of which sends its tensor to all others."""

    def __init__(self, tensor: Tensor, exchange: Exchange, counters: Counters):
        self._tensor = tensor
        self._exchange = exchange
        self._counters = counters

    def wait(self) -> None:
        with span("wait", self._tensor.nbytes, self._counters):
            received = self._exchange.wait()
        _take_maximum(self._tensor, received)


class OpeningAgreement(Agreement):
    """A comparison, and an element-wise maximum over ranks of what travels with it.

    Args:
        values: what this rank sends, and where the result goes; a peer whose call is another one sends more or fewer.
    """

    def __init__(self, opening: Opening, values: Tensor, counters: Counters):
        self._opening = opening
        self._values = values
        self._counters = counters

    def wait(self) -> None:
        with span("wait", self._values.nbytes, self._counters):
            self._opening.compare()
            received = self._opening.wait()
        if all(message.nbytes == self._values.nbytes for message in received):
            _take_maximum(self._values, received)


class PartedAgreement(Agreement):
    """An element-wise maximum over ranks, each of which finds that of one part and tells it to all others.

    It takes two rounds, in which each of n ranks sends 2 (n - 1) / n of the tensor, not n - 1 of it. All ranks start
    and wait for their agreements in the same order.
    """

    def __init__(self, mesh: Mesh, rank: int, world_size: int, tensor: Tensor, counters: Counters):
        self._mesh = mesh
        self._rank = rank
        self._parts = tensor.view(-1).tensor_split(world_size)
        self._counters = counters
        own = self._parts[rank]
        self._exchange = mesh.start([[memory_of(part)] for part in self._parts], own.nbytes, own.nbytes)
        counters.wire_bytes += tensor.nbytes + (world_size - 2) * own.nbytes  # of other parts, and of its own

    def wait(self) -> None:
        nbytes = sum(part.nbytes for part in self._parts)
        with span("wait", nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            _take_maximum(self._parts[self._rank], self._exchange.wait())
            Gather(self._mesh, self._rank, list(map(memory_of, self._parts))).wait()


def _take_maximum(tensor: Tensor, received: Iterable[memoryview]) -> None:
    """Replace `tensor` by the element-wise maximum with the messages."""
    for message in received if tensor.numel() else ():
        torch.maximum(tensor, torch.frombuffer(message, dtype=tensor.dtype).view_as(tensor), out=tensor)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return memoryview(flat.view(torch.uint8).numpy())
