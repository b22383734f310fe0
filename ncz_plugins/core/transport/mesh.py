"""Messages between all ranks of a group, over TCP connections of our own.

A rank sends on the thread that has something to say, and receives on the thread that waits for it. So a message wakes
up one thread. Through gloo it passes through more threads on both sides: a short message takes ten times as long, and
on few cores a long one takes time from those who code.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from ..errors import PeerError, fresh, without_frames
from .addresses import own_address
from .base import peer_errors

MOST_RANKS = 16  # each rank sends to all others; more of them agree in rounds, see connections.py
_LENGTH = struct.Struct("<q")  # goes before each message: its bytes
_HELLO = struct.Struct("<16sqq")  # what a rank says when it connects: the other one's secret, its own rank, the channel
_HELLO_SECONDS = 5.0
_CALL_AGAIN_SECONDS = 0.1
_ANSWER = b"\n"  # what the other one says to that
_POLL_SECONDS = 3600.0  # poll(2) counts milliseconds by an int, which some time-outs are too long for

# Nothing is to be joined to the end of a message. Else Linux may hold that end back until what is before it has left
# this machine (tcp_autocorking), and behind a limited link it was seen to wait for the receiver's delayed
# acknowledgement, 40 ms. Other systems refuse the flag on such sockets.
_SEND_FLAGS = socket.MSG_EOR if sys.platform == "linux" else 0

Memory = bytes | memoryview  # of bytes

_open: weakref.WeakSet[Mesh] = weakref.WeakSet()


def open_mesh(store: dist.Store, rank: int, world_size: int, timeout: timedelta, channels: int = 1) -> Mesh | None:
    """Connect this rank with all others that meet at `store`. All ranks must call it.

    Args:
        channels: connections with each of them, the same number on all ranks.

    Returns: None on every rank if there are too many of them, or if one has no address to listen at, or was told to
    encrypt what it sends, which gloo can do and this can't.

    Raises PeerError if the other ranks don't come.
    """
    if world_size > MOST_RANKS:
        return None
    address = None if os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS" else own_address()
    deadline = time.monotonic() + timeout.total_seconds()
    secret = secrets.token_bytes(16)
    with ExitStack() as opened:  # what is in it is closed, unless all goes well
        listener = _listener(address)
        said = ""
        if listener is not None:
            opened.enter_context(listener)
            said = f"{address} {listener.getsockname()[1]} {secret.hex()}"
        with peer_errors("connecting to the other ranks"):
            store.set(f"{rank}", said)
            store.wait([f"{peer}" for peer in range(world_size)], timeout)
            met = [store.get(f"{peer}").decode() for peer in range(world_size)]
        if not all(met):
            return None
        sockets: dict[tuple[int, int], socket.socket] = {}  # by rank and channel
        unreached: set[int] = set()  # the rank that is being called
        expected = [(peer, channel) for peer in range(rank + 1, world_size) for channel in range(channels)]
        try:

            def called(peer: int, channel: int) -> socket.socket:
                nonlocal unreached
                unreached = {peer}
                connection = opened.enter_context(_called(met[peer], rank, channel, deadline))
                unreached = set()
                return connection

            # All are called before the first answer is awaited, so that not each of them costs a round trip of its own.
            waiting = [(peer, channel) for peer in range(rank) for channel in range(channels)]
            calling = {where: called(*where) for where in waiting}
            for where in waiting:
                while not _is_answered(calling[where], deadline):
                    calling[where].close()
                    time.sleep(_CALL_AGAIN_SECONDS)
                    calling[where] = called(*where)
                sockets[where] = calling[where]
            while len(sockets) < (world_size - 1) * channels:
                where, connection = _accepted(listener, secret, expected, deadline)
                sockets[where] = opened.enter_context(connection)
        except OSError as error:
            there = {peer for peer, channel in sockets if channel == channels - 1}
            missing = ", ".join(map(str, sorted(unreached or {*range(world_size)} - there - {rank})))
            raise PeerError(
                f"connecting to rank {missing} failed: {error}. It has died, or nothing can reach it at the address of "
                "its interface: look at its log, and see GLOO_SOCKET_IFNAME"
            ) from error
        mesh = Mesh([_Peer(peer, sockets[peer, channel]) for peer, channel in sorted(sockets)], timeout)
        opened.pop_all()
    listener.close()
    return mesh


class Mesh:
    """Connections with each other rank.

    What one rank sends to another through one channel arrives in that order. One thread makes the calls; `close` may
    come from any.

    Args:
        peers: the channels to the other ranks, in the order of these.
        timeout: how long to wait for one of them that neither sends nor takes anything.
    """

    def __init__(self, peers: list[_Peer], timeout: timedelta):
        self._peers = peers
        self._by_rank: dict[int, list[_Peer]] = {}
        for peer in peers:
            self._by_rank.setdefault(peer.rank, []).append(peer)
        self._first = [of_one[0] for of_one in self._by_rank.values()]
        # Each rank begins with the one after it. If all began with rank 0, its link would be full and all others idle.
        lower = sum(peer.rank == at for at, peer in enumerate(self._first))
        self._next_first = self._first[lower:] + self._first[:lower]
        self._by_socket = {peer.socket.fileno(): peer for peer in peers}
        self._poll = select.poll()
        self.channels = max((len(of_one) for of_one in self._by_rank.values()), default=1)
        self._timeout = timeout.total_seconds()
        self._lock = threading.RLock()  # held while sockets are used, so that no other thread closes them meanwhile
        self._closed: str | None = None  # why, in words
        _open.add(self)

    @property
    def channels(self) -> int:
        """How many connections with each rank are in use; at first, all. Nothing is under way when this changes."""
        return self._channels

    @channels.setter
    def channels(self, count: int) -> None:
        self._channels = count
        self._in_use = [peer for of_one in self._by_rank.values() for peer in of_one[:count]]
        for peer in self._peers:
            peer.be_watched(self._poll)  # no longer, if it is not in use any more

    def close_unused(self) -> None:
        """Close the connections that are not in use, for good, on all ranks. Nothing is under way."""
        with self._lock:
            for peer in self._peers:
                if peer not in self._in_use:
                    peer.drop()
            self._peers = self._in_use
            self._by_rank = {rank: of_one[: self._channels] for rank, of_one in self._by_rank.items()}
            self._by_socket = {peer.socket.fileno(): peer for peer in self._peers}

    def start(
        self, messages: Sequence[Sequence[Memory]], least: int, most: int, places: Sequence[Place | None] | None = None
    ) -> Exchange:
        """Both `tell` and `Exchange.receive`, with their arguments."""
        exchange = self.tell(messages)
        exchange.receive(least, most, places)
        return exchange

    def tell(self, messages: Sequence[Sequence[Memory]]) -> Exchange:
        """Start to send a message to each other rank through channel 0, of which one is to be received. It never waits.

        Args:
            messages: for each rank the bytes that its message consists of, in parts. The one for this rank is ignored.
                They must not change before they have left, see `Exchange`.
        """
        with self._lock:
            self._require_open()
            return Exchange(self, [peer.send(messages[peer.rank]) for peer in self._next_first])

    def expect(self, least: int, most: int, places: Sequence[Place | None] | None) -> list[Incoming]:
        """Start to receive a message of each other rank through channel 0: see `Exchange.receive`."""
        with self._lock:
            self._require_open()
            return [peer.receive(least, most, places[peer.rank] if places else None) for peer in self._first]

    def send(self, to: int, message: Memory, channel: int = 0) -> Outgoing:
        """Start to send a message to one rank, which receives it by `receive`. It never waits.

        What has come meanwhile is taken in, so that those who send it can go on.

        Args:
            message: bytes that must not change before they have left.
        """
        with self._lock:
            self._require_open()
            outgoing = self._by_rank[to][channel].send([message])
            for peer in self._in_use:
                peer.is_full = False  # some of it has left since
                peer.advance()
            return outgoing

    def receive(self, source: int, least: int, most: int, channel: int = 0) -> Incoming:
        """Start to receive a message of one rank. Those of a channel come in the order in which they were sent."""
        with self._lock:
            self._require_open()
            return self._by_rank[source][channel].receive(least, most)

    def finish(self, messages: Sequence[Outgoing | Incoming]) -> None:
        """Return once these messages were received and sent. Raises PeerError."""
        self._go_on_until(messages)

    def reach(self, messages: Sequence[Outgoing | Incoming], nbytes: int) -> None:
        """Return once so many bytes of each of these messages, or all, were received and sent. Raises PeerError."""
        self._go_on_until(messages, nbytes)

    def close(self, reason: str) -> None:
        """Close all connections, so that a peer that waits for this rank gets an error at once. Safe to call twice.

        Args:
            reason: what those who use them later are told.
        """
        self._closed = self._closed or reason
        for peer in self._peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)  # a thread in `finish` wakes up, and leaves
        with self._lock:
            self.drop()

    def drop(self) -> None:
        """Forget the connections. Only the last process that holds them ends them so: a fork does not."""
        for peer in self._peers:
            peer.drop()

    def __del__(self):
        self.drop()

    def _require_open(self) -> None:
        if self._closed is not None:
            raise PeerError(self._closed)

    def _go_on_until(self, messages: Sequence[Outgoing | Incoming], nbytes: int | None = None) -> None:
        """Send and receive, whatever there is, until all of these messages have come as far, or are over."""
        with self._lock:
            ready, awaited = self._in_use, _awaited(messages, nbytes)
            begun = time.monotonic()
            for peer in awaited:
                peer.heard = begun
            while awaited:
                for peer in ready:
                    peer.advance()
                awaited = _awaited(messages, nbytes)
                if awaited:
                    self._require_open()  # first, as peers seem to have closed what another thread closed
                    for peer in awaited:
                        peer.require_reachable()
                    ready = self._wait_for(awaited)

    def _wait_for(self, awaited: Sequence[_Peer]) -> list[_Peer]:
        """Wait until a peer has sent something or takes more, or for a while. PeerError if one was silent for too long.

        Not only until one of those that are awaited has: what others send must not fill the buffers.

        Returns: which peers have, or do.
        """
        for peer in self._in_use:
            peer.be_watched(self._poll)
        silent_since = min(peer.heard for peer in awaited)
        left = silent_since + self._timeout - time.monotonic()
        if left <= 0:
            names = ", ".join(map(str, sorted({peer.rank for peer in awaited if peer.heard == silent_since})))
            raise PeerError(
                f"rank {names} has not answered within the time-out of {self._timeout:g} s. It hangs, is cut off, or "
                "is far behind: look at its log, and raise transport.timeout_seconds if it was only slow."
            )
        events = self._poll.poll(1000 * min(left, _POLL_SECONDS))
        heard = time.monotonic()
        ready = []
        for number, event in events:
            peer = self._by_socket[number]
            peer.heard = heard
            if event != select.POLLIN:  # it takes more, or whoever tries learns what is wrong
                peer.is_full = False
            ready.append(peer)
        return ready


def _awaited(messages: Sequence[Outgoing | Incoming], nbytes: int | None) -> list[_Peer]:
    """The peers of messages that have not come so far; of those that are not over, if None. One may be there twice."""
    return [message.peer for message in messages if not message.has(nbytes)]


class Place(NamedTuple):
    """Memory for a message that begins as expected.

    Attributes:
        head: what it must begin with; no longer than the shortest message that is possible.
        rest: where what it must have behind that goes. Nobody else may use it meanwhile.
    """

    head: bytes
    rest: memoryview


class Exchange:
    """One message to each other rank, under way, and one from each.

    Attributes:
        ranks: the other ranks, in order.
    """

    def __init__(self, mesh: Mesh, outgoing: list[Outgoing]):
        self._mesh = mesh
        self._outgoing = outgoing
        self._incoming: list[Incoming] = []

    def receive(self, least: int, most: int, places: Sequence[Place | None] | None = None) -> None:
        """Start to receive. Called once, before any other exchange begins. It never waits.

        Args:
            least, most: bytes that a peer's message may have.
            places: for each rank where its message goes, if it fits there; None: into new memory.
        """
        self._incoming = self._mesh.expect(least, most, places)

    @property
    def ranks(self) -> list[int]:
        return [message.peer.rank for message in self._incoming]

    def wait(self) -> list[memoryview]:
        """What `ranks` sent, as bytes. This rank's own messages have left by then.

        Raises PeerError.
        """
        self._mesh.finish([*self._outgoing, *self._incoming])
        return [message.values for message in self._incoming]

    def reach(self, nbytes: int) -> list[memoryview]:
        """The same, as soon as so many bytes of each message have come and left, or all if it has fewer.

        So who sends a tensor and receives what is added to it can replace these bytes of it by the sum.
        """
        self._mesh.reach([*self._outgoing, *self._incoming], nbytes)
        return [message.values for message in self._incoming]


class Outgoing:
    """A message that is being sent.

    Attributes:
        ended: when the last of it had left this process, in seconds of `time.perf_counter`; None before.
    """

    def __init__(self, peer: _Peer, parts: Sequence[Memory]):
        self.peer = peer
        self.ended: float | None = None
        self._sent = -_LENGTH.size
        views = [memoryview(part) for part in parts if len(part)]
        self._left = [memoryview(_LENGTH.pack(sum(map(len, views)))), *views]

    def has(self, nbytes: int | None) -> bool:
        """Whether so many bytes of it have left, or all; None: all."""
        return self.ended is not None or (nbytes is not None and self._sent >= nbytes)

    def advance(self, to: socket.socket) -> None:
        """Send what can be sent now."""
        sent = to.sendmsg(self._left, [], _SEND_FLAGS)
        self._sent += sent
        while self._left and sent >= self._left[0].nbytes:
            sent -= self._left.pop(0).nbytes
        if self._left:
            self._left[0] = self._left[0][sent:]
        else:
            self.ended = time.perf_counter()


class Incoming:
    """A message that is being received.

    Attributes:
        values: what came, as bytes; only the head, if the rest went to its place. None as long as that is not known.
        ended: when all of it was there, in seconds of `time.perf_counter`; None before.
    """

    def __init__(self, peer: _Peer, least: int, most: int, place: Place | None = None):
        self.peer = peer
        self._possible = least, most
        # What is sure to come, and tells where the rest goes.
        self._begun = memoryview(bytearray(_LENGTH.size + (len(place.head) if place else 0)))
        self._parts = self._memory(place)
        self._left = next(self._parts)
        self._arrived = -_LENGTH.size
        self.values: memoryview | None = None
        self.ended: float | None = None

    def has(self, nbytes: int | None) -> bool:
        """Whether so many bytes of it are where they belong, or it is over; None: whether it is over."""
        if self.ended is not None:
            return True
        return nbytes is not None and self.values is not None and self._arrived >= nbytes

    def drop(self) -> None:
        """Forget where it goes, which would keep this object as well: nothing more is received."""
        self._parts = iter(())

    def advance(self, source: socket.socket) -> None:
        """Receive what is there. Raises PeerError."""
        while self.ended is None:
            wanted = self._left.nbytes
            received = source.recv_into(self._left)
            if not received:
                raise PeerError(_gone(self.peer.rank))
            self._left = self._left[received:]
            self._arrived += received
            if received < wanted:
                if self.values is None and self._arrived >= 0:
                    self._length()  # nothing more may come of a message that is too short
                return  # to ask for more would say that there is none
            # Empty parts are passed over, as to receive nothing looks as if the connection had ended.
            self._left = next((part for part in self._parts if part.nbytes), None)
            if self._left is None:
                self.ended = time.perf_counter()

    def _memory(self, place: Place | None) -> Iterator[memoryview]:
        """What is to be filled, one part after the other."""
        yield self._begun
        nbytes, begun = self._length(), self._begun[_LENGTH.size :]
        if place is not None and nbytes == len(place.head) + place.rest.nbytes and begun == place.head:
            self.values = begun
            yield place.rest
            return
        self.values = memoryview(np.empty(nbytes, np.uint8))
        self.values[: begun.nbytes] = begun
        yield self.values[begun.nbytes :]

    def _length(self) -> int:
        """The bytes of the message, as it says. Raises PeerError if it can't be."""
        least, most = self._possible
        (nbytes,) = _LENGTH.unpack_from(self._begun)
        if not least <= nbytes <= most:
            raise PeerError(
                f"rank {self.peer.rank} sent a message of {nbytes} bytes; {least} to {most} are possible. "
                "All ranks must run the same version of ncz_plugins."
            )
        return nbytes


class _Peer:
    """A connection with one rank."""

    def __init__(self, rank: int, connection: socket.socket):
        self.rank = rank
        self.socket = connection
        self.outgoing: deque[Outgoing] = deque()
        self.incoming: deque[Incoming] = deque()
        self._lost: OSError | PeerError | None = None  # what happened to the connection
        self._watched = 0  # the events that are polled for
        self.is_full = False  # the socket, which took no more when it was last tried
        self.heard = 0.0  # when it last sent or took something, or somebody began to wait for it
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def drop(self) -> None:
        """Forget the connection, and the messages under way, which hold the caller's tensors."""
        self.socket.close()
        self.outgoing.clear()
        for message in self.incoming:
            message.drop()
        self.incoming.clear()

    def be_watched(self, poll: select.poll) -> None:
        """Let `poll` watch for what the messages under way need, if there are any, and for the end of the connection.

        It stays so until they need something else: to begin afresh in each wait takes as long as some waits.
        """
        wanted = 0
        if self._lost is None:
            wanted = (select.POLLIN if self.incoming else 0) | (select.POLLOUT if self.outgoing else 0)
        if wanted == self._watched:
            return
        if wanted:
            poll.register(self.socket, wanted)
        else:
            poll.unregister(self.socket)
        self._watched = wanted

    def send(self, parts: Sequence[Memory]) -> Outgoing:
        """Start to send a message, behind those before it."""
        message = Outgoing(self, parts)
        self.outgoing.append(message)
        self.send_more()
        return message

    def receive(self, least: int, most: int, place: Place | None = None) -> Incoming:
        """Start to receive a message, behind those before it."""
        message = Incoming(self, least, most, place)
        self.incoming.append(message)
        return message

    def advance(self) -> None:
        """Send and receive what is possible now."""
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
            self._lost = without_frames(error)

    def require_reachable(self) -> None:
        """Raise PeerError if nothing more can come or go. Messages before that were received, and may say why."""
        if isinstance(self._lost, PeerError):
            raise fresh(self._lost)
        if self._lost is not None:
            raise PeerError(f"{_gone(self.rank)} ({self._lost})") from self._lost

    def send_more(self) -> None:
        """Send what is possible now."""
        try:
            while self.outgoing and not self.is_full:
                self.outgoing[0].advance(self.socket)
                if self.outgoing[0].ended is None:
                    self.is_full = True
                else:
                    self.outgoing.popleft()
        except BlockingIOError:
            self.is_full = True
        except OSError as error:
            self._lost = without_frames(error)
            self.outgoing.clear()


def _gone(rank: int) -> str:
    return f"rank {rank} has closed its connections: it died, left, or met an error; look at its log"


# ---------------------------------------------------------------- connecting


def _listener(address: str | None) -> socket.socket | None:
    """Where other ranks connect to this one; None if nothing can listen at that address."""
    if address is None:
        return None
    with suppress(OSError):
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return None


def _called(said: str, rank: int, channel: int, deadline: float) -> socket.socket:
    """A connection with the rank that said so at the store, to which this one has said hello."""
    host, port, secret = said.split()
    connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
    try:
        connection.sendall(_HELLO.pack(bytes.fromhex(secret), rank, channel))
    except OSError:
        connection.close()
        raise
    return connection


def _is_answered(connection: socket.socket, deadline: float) -> bool:
    """Whether the other rank has answered; False if it has closed the connection, say, as the hello came too late.

    Raises TimeoutError.
    """
    while True:
        connection.settimeout(_left(deadline))
        try:
            return connection.recv(len(_ANSWER)) == _ANSWER
        except TimeoutError:
            continue  # which `_left` raises if there is no time left
        except OSError:
            return False


def _accepted(
    listener: socket.socket, secret: bytes, expected: Sequence[tuple[int, int]], deadline: float
) -> tuple[tuple[int, int], socket.socket]:
    """The next of these, rank and channel, that connects. Whoever else does is turned away."""
    while True:
        listener.settimeout(_left(deadline))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue  # which `_left` raises if there is no time left
        who = _greeted(connection, secret, min(deadline, time.monotonic() + _HELLO_SECONDS))
        if who in expected:
            with suppress(OSError):
                connection.sendall(_ANSWER)
                return who, connection
        connection.close()


def _greeted(connection: socket.socket, secret: bytes, deadline: float) -> tuple[int, int] | None:
    """Which rank has connected, by which channel; None if it does not know the secret, or does not say it in time."""
    hello = b""
    with suppress(OSError):
        while len(hello) < _HELLO.size:
            connection.settimeout(_left(deadline))
            more = connection.recv(_HELLO.size - len(hello))
            if not more:
                return None
            hello += more
        theirs, *who = _HELLO.unpack(hello)
        return tuple(who) if hmac.compare_digest(theirs, secret) else None
    return None


def _left(deadline: float) -> float:
    """Seconds, no more than a socket can wait. Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return min(left, _POLL_SECONDS)


def _drop_all() -> None:
    for mesh in list(_open):
        mesh.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
