"""Messages between all ranks of a group, over TCP connections of our own.

A message is sent by the thread that has it, and received by the thread that waits for it, so it wakes up one thread.
Gloo passes a message through more threads on both sides. A short message then takes ten times as long, and on few cores
a long one takes time from coding.

- `open_mesh` connects all ranks with each other, by an `Endpoint`.
- `Mesh` starts messages, and sends and receives them while a thread waits.
- `SparseMesh` connects ranks when they first need each other. For many ranks.
- `Outgoing` and `Incoming` are single messages. `Exchange` is one message to each other rank, and one from each.
- `_Connection` is one socket, with the messages under way on it.

On the wire, the length of a message stands before it, as a 64-bit number.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from ..config.fields import MOST_SMALL_RANKS
from ..errors import PeerError, UnsupportedError, fresh, without_frames
from ..runtime.process import drop_in_forks
from .base import peer_errors
from .comparison import RankComparison
from .descriptors import shortage_of_descriptors
from .endpoint import Caller, Endpoint

MOST_RANKS = MOST_SMALL_RANKS  # more ranks are not all connected with each other: see `SparseMesh`
_LENGTH = struct.Struct("<q")  # of a message in bytes, before it
_LAST_WORDS_SECONDS = 0.5  # for the words of a rank that has closed its connections; they were sent before
_MOST_EXTRA_SECONDS = 10.0  # after a time-out, for the words of a rank that is only waiting itself
_MOST_PARTS = 1024  # of a message that one system call sends: IOV_MAX
_MAX_POLL_SECONDS = 3600.0  # poll(2) takes milliseconds in an int, and some time-outs are longer

# MSG_EOR: nothing may be joined to the end of a message. Otherwise Linux may hold the end back until the bytes before
# it have left this machine (tcp_autocorking). Behind a limited link it then waited 40 ms, for the receiver's delayed
# acknowledgement. Other systems refuse this flag for TCP.
_SEND_FLAGS = socket.MSG_EOR if sys.platform == "linux" else 0
_LEFT = getattr(select, "POLLRDHUP", 0)  # the event of a connection that the other end has closed; Linux has it

Memory = bytes | memoryview  # a memoryview has items of one byte
Parts = tuple[Memory, ...]  # of one message, one behind the other


def connects_all(world_size: int) -> bool:
    """Whether all ranks of a group of `world_size` are connected with each other."""
    return world_size <= MOST_RANKS


def open_mesh(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    channels: int = 1,
    names: Sequence[int] | None = None,
    wait: Callable[[dist.Store, list[str]], None] | None = None,
) -> Mesh | None:
    """Connect this rank with all others that meet at `store`. All ranks must call this.

    Args:
        store: a store that nothing else uses under the same prefix.
        timeout: how long to wait for other ranks, here and in each operation of the mesh.
        channels: TCP connections with each rank, the same number on all ranks.
        names: what messages call each rank; None: its number here.
        wait: waits until the store has some keys; None: by the store's own wait.

    Returns the mesh, or None on every rank: if one of them has no address to listen at, or if GLOO_DEVICE_TRANSPORT
    asks one for encryption, which only gloo has.

    Raises PeerError if the other ranks don't come.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    with closing(Endpoint(store, rank, timeout, names)) as endpoint:
        with peer_errors("connecting to the other ranks"):
            everyone = [f"{peer}" for peer in range(world_size)]
            if wait is None:
                store.wait(everyone, timeout)
            else:
                wait(store, everyone)
        if not all([endpoint.address_of(peer) for peer in range(world_size)]):
            return None
        others = [peer for peer in range(world_size) if peer != rank]
        return Mesh(_connections(endpoint, others, range(channels), deadline), timeout)


class Mesh:
    """Connections with each other rank: one or several TCP connections, called channels.

    Messages between two ranks on one channel arrive in the order in which they were sent. One thread calls the methods.
    Only `close` may be called from any thread.

    Args:
        connections: the connections, in the order of ranks and channels.
        timeout: how long to wait for a rank that neither sends nor takes anything.
    """

    def __init__(self, connections: list[_Connection], timeout: timedelta):
        self._connections: list[_Connection] = []
        self._by_rank: dict[int, list[_Connection]] = {}
        self._by_socket: dict[int, _Connection] = {}
        self._add(connections)
        self._first = [of_one[0] for of_one in self._by_rank.values()]
        # Each rank sends to the next rank first. If all began with rank 0, its link would be full and all others idle.
        lower = sum(connection.rank == number for number, connection in enumerate(self._first))
        self._next_first = self._first[lower:] + self._first[:lower]
        self._poll = select.poll()
        self.channels = max((len(of_one) for of_one in self._by_rank.values()), default=1)
        self._timeout = timeout.total_seconds()
        self._lock = threading.RLock()  # held while sockets are used, so that no other thread closes them
        self._closed: str | None = None  # why the mesh was closed
        drop_in_forks(self)

    def _add(self, connections: list[_Connection]) -> None:
        self._connections = [*self._connections, *connections]
        for connection in connections:
            self._by_rank.setdefault(connection.rank, []).append(connection)
            self._by_socket[connection.socket.fileno()] = connection

    @property
    def channels(self) -> int:
        """The number of connections with each rank that are in use; at first all.

        Set it only when nothing is under way.
        """
        return self._channels

    @channels.setter
    def channels(self, count: int) -> None:
        self._channels = count
        self._in_use = [connection for of_one in self._by_rank.values() for connection in of_one[:count]]
        for connection in self._connections:
            connection.update_poll(self._poll)  # connections out of use are not polled any more

    def connect(self, peers: Iterable[int]) -> None:
        """Connect with these ranks, which do the same. Here all are connected from the start."""

    def close_unused(self) -> None:
        """Close the connections that are not in use, for good. All ranks call this, when nothing is under way."""
        with self._lock:
            for connection in self._connections:
                if connection not in self._in_use:
                    connection.drop()
            self._connections = self._in_use
            self._by_rank = {rank: of_one[: self._channels] for rank, of_one in self._by_rank.items()}
            self._by_socket = {connection.socket.fileno(): connection for connection in self._connections}

    def start(
        self, messages: Sequence[Memory], least: int, most: int, memories: Sequence[memoryview | None] = ()
    ) -> Exchange:
        """Start to send and to receive: see `tell` and `Exchange.receive`."""
        return self.tell(messages).receive(least, most, memories)

    def tell(self, messages: Sequence[Memory | Parts], comparison: RankComparison | None = None) -> Exchange:
        """Start to send a message to each other rank on channel 0, without a wait.

        Args:
            messages: the message for each rank, or its parts; that for this rank is ignored. The memory must not change
                before the message has left.
            comparison: numbers that stand before each message, for the other ranks to compare.

        Returns the exchange. Call its `receive` for the messages of the other ranks.
        """
        head = b"" if comparison is None else comparison.told
        with self._lock:
            self._require_open()
            outgoing = [connection.send([head, *_parts(messages[connection.rank])]) for connection in self._next_first]
        return Exchange(self, outgoing, head, comparison)

    def expect(
        self, head: bytes, least: int, most: int, memories: Sequence[memoryview | Parts | None] = ()
    ) -> list[Incoming]:
        """Start to receive a message of each other rank on channel 0: see `Exchange.receive`.

        Args:
            head: the first bytes of each message, if a rank makes the same call.
        """
        with self._lock:
            self._require_open()
            return [
                connection.receive(least, most, head, memories[connection.rank] if memories else None)
                for connection in self._first
            ]

    def send(self, to: int, message: Memory | Parts, channel: int = 0) -> Outgoing:
        """Start to send a message to one rank, without a wait. The rank calls `receive` for it.

        Also receives what has come meanwhile, so that its senders can go on.

        Args:
            message: bytes that must not change before they have left.
        """
        with self._lock:
            self._require_open()
            outgoing = self._by_rank[to][channel].send(_parts(message))
            for connection in self._ready(0):
                connection.advance()
            return outgoing

    def receive(
        self, source: int, least: int, most: int, channel: int = 0, memory: memoryview | None = None
    ) -> Incoming:
        """Start to receive a message of `least` to `most` bytes from one rank, without a wait.

        Args:
            memory: where the message goes if it has this length; None: to new memory.
        """
        with self._lock:
            self._require_open()
            return self._by_rank[source][channel].receive(least, most, memory=memory)

    def name_of(self, rank: int) -> int:
        """What messages call a rank."""
        return self._by_rank[rank][0].name

    def has_left(self, rank: int) -> bool:
        """Whether another rank has closed its connections, as a process that ends does. Any thread may ask.

        Raises PeerError if this rank has closed them.
        """
        self._require_open()
        descriptor = self._by_rank[rank][0].socket.fileno()
        if descriptor < 0:  # closed this moment
            return False
        poll = select.poll()
        poll.register(descriptor, _LEFT)
        return any(event & (_LEFT | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def finish(self, messages: Sequence[Outgoing | Incoming]) -> None:
        """Wait until these messages were sent and received. Raises PeerError."""
        with self._lock:
            ready, awaited = self._in_use, _awaited(messages)
            begun = time.monotonic()
            for connection in awaited:
                connection.heard = begun
            while awaited:
                for connection in ready:
                    connection.advance()
                awaited = _awaited(messages)
                if awaited:
                    self._require_open()  # first: after a close of our own, `require_reachable` would blame the peer
                    for connection in awaited:
                        connection.require_reachable()
                    ready = self._wait_for(awaited)

    def close(self, reason: str) -> None:
        """Close all connections, so that peers that wait for this rank get an error at once. Safe to call twice.

        Args:
            reason: message of the PeerError that later uses of the mesh raise.
        """
        self._closed = self._closed or reason
        for connection in self._connections:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits in `finish`
        with self._lock:
            self.drop()

    def drop(self) -> None:
        """Close this process's descriptors of the connections. In a fork, the parent's connections go on."""
        for connection in self._connections:
            connection.drop()

    def __del__(self):
        self.drop()

    def _require_open(self) -> None:
        if self._closed is not None:
            raise PeerError(self._closed)

    def _wait_for(self, awaited: Sequence[_Connection]) -> list[_Connection]:
        """Wait until a connection can receive or send, at most until the time-out.

        Waits for all connections in use, so that what other ranks send does not fill the buffers.

        Args:
            awaited: the connections with messages to wait for.

        Returns the connections that can receive or send. Raises PeerError if an awaited one was silent for too long.
        """
        silent_since = min([connection.heard for connection in awaited])
        left = silent_since + self._timeout - time.monotonic()
        if left <= 0:
            silent = {connection.name for connection in awaited if connection.heard == silent_since}
            names = ", ".join(map(str, sorted(silent)))
            raise PeerError(
                f"rank {names} has not answered within the time-out of {self._timeout:g} s. It hangs, is cut off, or "
                "is far behind: look at its log, and raise transport.timeout_seconds if it was only slow."
            )
        return self._ready(1000 * min(left, _MAX_POLL_SECONDS))

    def _ready(self, milliseconds: float) -> list[_Connection]:
        """The connections that can receive or send, once there are any or the time is over."""
        for connection in self._in_use:
            connection.update_poll(self._poll)
        events = self._poll.poll(milliseconds)
        heard = time.monotonic()
        ready = []
        for descriptor, event in events:
            connection = self._by_socket[descriptor]
            connection.heard = heard
            if event != select.POLLIN:  # it can send, or the next try to send raises its error
                connection.is_full = False
            ready.append(connection)
        return ready


class SparseMesh(Mesh):
    """Mesh in which a rank is connected only with those that it has to do with. For many ranks.

    There are messages between two ranks, and none to all others at once.

    A rank that fails tells those that it is connected with why, before it closes its connections, and they pass that
    on. So errors name the rank that died and not only one that gave up because of it.

    Args:
        endpoint: this rank's end of all connections. It may be shared, and is closed with this mesh.
        channels: the channels of the endpoint that this mesh uses.
        timeout: see `Mesh`.
    """

    def __init__(self, endpoint: Endpoint, channels: range, timeout: timedelta):
        self._endpoint = endpoint
        self._numbers = channels
        super().__init__([], timeout)
        self.channels = len(channels)

    @property
    def ranks(self) -> list[int]:
        """The ranks that this one is connected with."""
        return list(self._by_rank)

    def connect(self, peers: Iterable[int]) -> None:
        """Connect with those of these ranks that this one is not connected with. They must do the same.

        Raises PeerError, and UnsupportedError if this process may not open enough descriptors.
        """
        missing = set(peers).difference(self._by_rank)
        if not missing:
            return
        self._require_open()
        if refusal := shortage_of_descriptors(len(missing) * len(self._numbers), 1 + len(missing)):
            raise UnsupportedError(refusal)
        connections = _connections(self._endpoint, missing, self._numbers)
        with self._lock:
            if self._closed is not None:  # another thread has closed the mesh
                for connection in connections:
                    connection.drop()
            self._require_open()
            self._add(connections)
            self.channels = self.channels  # they are in use from now on

    def close_unused(self) -> None:
        super().close_unused()
        self._numbers = self._numbers[: self.channels]

    def close(self, reason: str) -> None:
        self._endpoint.close(reason)
        super().close(reason)

    def has_left(self, rank: int) -> bool:
        """See `Mesh.has_left`. Nobody knows of ranks that this one is not connected with."""
        return rank in self._by_rank and super().has_left(rank)

    def finish(self, messages: Sequence[Outgoing | Incoming]) -> None:
        try:
            super().finish(messages)
        except PeerError as error:
            if self._closed is not None:
                raise
            raise self._explained(error, _awaited(messages)) from None

    def drop(self) -> None:
        super().drop()
        self._endpoint.drop()

    def _explained(self, error: PeerError, awaited: Sequence[_Connection]) -> PeerError:
        """The error with its first cause, if the rank that was waited for says that it is not the cause."""
        endpoint, suspects = self._endpoint, {connection.rank for connection in awaited}
        is_silent = all(connection.is_open for connection in awaited)
        seconds = _LAST_WORDS_SECONDS
        if is_silent:  # others wait for this rank: they hear at once that it is there, and whom it waits for
            endpoint.tell(str(error), self.ranks)
            seconds = min(self._timeout / 4, _MOST_EXTRA_SECONDS)
        deadline = time.monotonic() + seconds
        while (words := endpoint.heard(suspects, deadline - time.monotonic())) is not None:
            endpoint.cause = words
            error = PeerError(f"{words} (rank {endpoint.names_of(suspects)} gave up because of that)")
            if not is_silent:
                break
            endpoint.tell(words, self.ranks)
        return error


def _connections(
    endpoint: Endpoint, peers: Iterable[int], channels: range, deadline: float | None = None
) -> list[_Connection]:
    """Connect with these ranks: see `Endpoint.connect`. The connections are in the order of ranks and channels."""
    sockets: Mapping[Caller, socket.socket] = endpoint.connect(peers, channels, deadline)
    return [_Connection(peer, endpoint.name_of(peer), opened) for (peer, _), opened in sockets.items()]


def _awaited(messages: Sequence[Outgoing | Incoming]) -> list[_Connection]:
    """The connections of messages that are under way. A connection may be there several times."""
    return [message.connection for message in messages if message.ended is None]


class Exchange:
    """Messages under way: one to each other rank, and one from each.

    Args:
        outgoing: the messages to the other ranks.
        head: first bytes of each message, which ranks compare.
        comparison: takes the heads of the other ranks; None: there are no heads.
    """

    def __init__(self, mesh: Mesh, outgoing: list[Outgoing], head: bytes, comparison: RankComparison | None):
        self._mesh = mesh
        self._outgoing = outgoing
        self._head = head
        self._comparison = comparison
        self._incoming: list[Incoming] = []

    def receive(self, least: int, most: int, memories: Sequence[memoryview | Parts | None] = ()) -> Exchange:
        """Start to receive, without a wait. Called once, before any other exchange begins. Returns this object.

        Args:
            least, most: bytes that a message may have, without its head.
            memories: for each rank, memory for its message, or for its parts, used if head and length are as expected;
                None: new memory. Nobody else may use it before `wait` has returned.
        """
        head_bytes = len(self._head)
        self._incoming = self._mesh.expect(self._head, head_bytes + least, head_bytes + most, memories)
        return self

    def wait(self) -> list[memoryview]:
        """Wait until all messages were sent and received, and pass their heads to the comparison. Raises PeerError.

        Returns the message of each other rank, in order, without its head. It is empty if it went to its memory.
        """
        self._mesh.finish([*self._outgoing, *self._incoming])
        if self._comparison is not None:
            self._comparison.hear([(message.connection.rank, message.head.tobytes()) for message in self._incoming])
        return [message.values for message in self._incoming]


class Outgoing:
    """Message that is being sent.

    Attributes:
        left: memory that has not left yet.
        ended: time when all of it had left this process, in seconds of `time.perf_counter`; None before.
    """

    def __init__(self, connection: _Connection, parts: Sequence[Memory]):
        self.connection = connection
        self.ended: float | None = None
        self.left = [_LENGTH.pack(sum(map(len, parts))), *filter(len, parts)]


class Incoming:
    """Message that is being received.

    Args:
        least, most: bytes that the message may have, with its head.
        head: expected first bytes; at most `least`.
        memory: memory for the bytes after the head, in one or several parts, used if the head and the length are as
            expected; None: new memory.

    Attributes:
        head: first bytes of the message, as many as were expected.
        values: bytes after the head; empty if they went to `memory`. None before the head has come.
        ended: time when all of it was there, in seconds of `time.perf_counter`; None before.
    """

    def __init__(
        self,
        connection: _Connection,
        least: int,
        most: int,
        head: bytes = b"",
        memory: memoryview | Parts | None = None,
    ):
        self.connection = connection
        self._possible = least, most
        self._expected = head, None if memory is None else _parts(memory)
        self._front = memoryview(bytearray(_LENGTH.size + len(head)))  # the length, then the head
        self.head = self._front[_LENGTH.size :]
        self.values: memoryview | None = None
        self._left = [self._front]  # memory that is being filled
        self.ended: float | None = None

    def drop(self) -> None:
        """Let go of the caller's memory."""
        self._expected = self._left = None

    def advance(self, source: socket.socket) -> None:
        """Receive as much as has come. Raises PeerError."""
        while self._left:
            received = source.recvmsg_into(self._left)[0]
            if not received:
                raise PeerError(_gone(self.connection.name))
            _pass(self._left, received)
            if self._left:
                if self.values is None and self._front.nbytes - self._left[0].nbytes >= _LENGTH.size:
                    self._length()  # raises if the message is shorter than the head: the rest would never come
                return  # nothing more has come
            # Receive what comes after the head, if there is any: receiving 0 bytes looks like the end of a connection.
            if self.values is None:
                self._left = self._memory_after_head()
        self.ended = time.perf_counter()

    def _memory_after_head(self) -> list[memoryview]:
        """The memory for the bytes after the head. Sets `values`."""
        nbytes = self._length() - self.head.nbytes
        head, memory = self._expected
        if memory is not None and self.head == head and sum(map(len, memory)) == nbytes:
            self.values = memoryview(b"")
            return list(filter(len, memory))
        self.values = memoryview(np.empty(nbytes, np.uint8))
        return [self.values] if nbytes else []

    def _length(self) -> int:
        """The length that stands before the message. Raises PeerError if it is not possible."""
        least, most = self._possible
        (nbytes,) = _LENGTH.unpack_from(self._front)
        if not least <= nbytes <= most:
            raise PeerError(
                f"rank {self.connection.name} sent a message of {nbytes} bytes; {least} to {most} are possible. "
                "All ranks must run the same version of ncz_plugins."
            )
        return nbytes


class _Connection:
    """TCP connection with one rank, and the messages under way on it, in order.

    Attributes:
        rank: the rank at the other end.
        name: what messages call it.
        outgoing, incoming: messages that are not over, oldest first.
        is_full: True if the socket took no more bytes when it was last tried.
        heard: time when the socket last sent or took something, or a wait for it began, in seconds of `time.monotonic`.
    """

    def __init__(self, rank: int, name: int, opened: socket.socket):
        self.rank = rank
        self.name = name
        self.socket = opened
        self.outgoing: deque[Outgoing] = deque()
        self.incoming: deque[Incoming] = deque()
        self._lost: OSError | PeerError | None = None  # the error that ended the connection
        self._polled = 0  # the events that are polled for
        self.is_full = False
        self.heard = 0.0
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_open(self) -> bool:
        """Whether no error has ended the connection."""
        return self._lost is None

    def drop(self) -> None:
        """Close the socket, and forget the messages under way, which hold the caller's tensors."""
        self.socket.close()
        self.outgoing.clear()
        self._receive_no_more()

    def update_poll(self, poll: select.poll) -> None:
        """Poll for what the messages under way need: to receive, to send, or nothing.

        The registration is kept from wait to wait: renewing 120 of them, with 16 ranks, takes 0.1 ms.
        """
        wanted = 0
        if self._lost is None:
            wanted = (select.POLLIN if self.incoming else 0) | (select.POLLOUT if self.outgoing else 0)
        if wanted == self._polled:
            return
        if wanted:
            poll.register(self.socket, wanted)
        else:
            poll.unregister(self.socket)
        self._polled = wanted

    def send(self, parts: Sequence[Memory]) -> Outgoing:
        """Start to send a message, after earlier ones."""
        message = Outgoing(self, parts)
        self.outgoing.append(message)
        self.send_more()
        return message

    def receive(self, least: int, most: int, head: bytes = b"", memory: memoryview | Parts | None = None) -> Incoming:
        """Start to receive a message, after earlier ones: see `Incoming`."""
        message = Incoming(self, least, most, head, memory)
        self.incoming.append(message)
        return message

    def advance(self) -> None:
        """Send and receive as much as is possible without a wait."""
        if self.outgoing:
            self.send_more()
        try:
            while self.incoming:
                self.incoming[0].advance(self.socket)
                if self.incoming[0].ended is None:
                    return
                self.incoming.popleft()
        except BlockingIOError:
            pass
        except (OSError, PeerError) as error:
            # Nothing more is received, and polled for: what is left in the socket would be taken for a message, or wake
            # up each wait at once.
            self._lost = without_frames(error)
            self._receive_no_more()

    def require_reachable(self) -> None:
        """Raise PeerError if the connection has ended. Messages that came before are received, and may say why."""
        if isinstance(self._lost, PeerError):
            raise fresh(self._lost)
        if self._lost is not None:
            raise PeerError(f"{_gone(self.name)} ({self._lost})") from self._lost

    def _receive_no_more(self) -> None:
        for message in self.incoming:
            message.drop()
        self.incoming.clear()

    def send_more(self) -> None:
        """Send as much as is possible without a wait."""
        try:
            while self.outgoing and not self.is_full:
                message = self.outgoing[0]
                _pass(message.left, self.socket.sendmsg(message.left[:_MOST_PARTS], [], _SEND_FLAGS))
                if message.left:
                    self.is_full = True
                else:
                    message.ended = time.perf_counter()
                    self.outgoing.popleft()
        except BlockingIOError:
            self.is_full = True
        except OSError as error:
            self._lost = without_frames(error)
            self.outgoing.clear()


def _parts(message: Memory | Parts) -> Parts:
    return message if isinstance(message, tuple) else (message,)


def _pass(memories: list[Memory], count: int) -> None:
    """Remove `count` bytes, which were sent or filled, from the front of memories. None of these may be empty."""
    while memories and count >= len(memories[0]):
        count -= len(memories.pop(0))
    if count:
        memories[0] = memoryview(memories[0])[count:]


def _gone(rank: int) -> str:
    """Error message for a rank that has closed its connections."""
    return f"rank {rank} has closed its connections: it died, left, or met an error; look at its log"
