"""Where a rank listens, and how ranks connect: the higher of two ranks calls the lower one.

A rank writes its address to the store, and reads those of the ranks that it connects with. A call begins with a secret
of the rank that is called, so that nobody else gets in, and is answered. Ranks that gave up call as well, to say why.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import ErrorTranslation, NczError, PeerError
from .addresses import own_address
from .base import peer_errors

_HELLO = struct.Struct("<16sqq")  # first bytes of a connection: secret of the rank that is called, own rank, channel
_HELLO_SECONDS = 5.0  # time-out for the hello of a new connection
_CALL_AGAIN_SECONDS = 0.1
_ANSWER = b"\n"  # the answer to a valid hello
_MAX_WAIT_SECONDS = 3600.0  # sockets take milliseconds in an int, and some time-outs are longer
_WORDS = -1  # in place of a channel: words follow, and the connection ends
_MOST_WORDS_BYTES = 1000
_TELL_SECONDS = 1.0
_BACKLOG = 4096  # calls that may wait to be accepted; the system may allow fewer

Caller = tuple[int, int]  # rank and channel


class Endpoint:
    """This rank's end of connections with others that meet at a store.

    Args:
        store: a store that nothing else uses under the same prefix. Each rank makes one endpoint there.
        timeout: how long to wait for other ranks.
        names: what messages call each rank; None: its number here.

    Attributes:
        cause: what a rank that gave up has told this one; None: nothing.

    Raises PeerError if the store has gone.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta, names: Sequence[int] | None = None):
        self.cause: str | None = None
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._names = names
        self._secret = secrets.token_bytes(16)
        self._addresses: dict[int, str] = {}
        self._early: dict[Caller, socket.socket] = {}  # calls that this rank was not waiting for yet
        self._words: list[tuple[int, str]] = []
        self._closed: str | None = None  # why it was closed
        address = None if os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS" else own_address()
        self._listener = _listener(address)
        own = ""
        if self._listener is not None:
            own = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}"
        with peer_errors("connecting to the other ranks"):
            store.set(f"{rank}", own)

    @property
    def listens(self) -> bool:
        """Whether others can call this rank: it has an address, and gloo is not told to encrypt, as only gloo does."""
        return self._listener is not None

    def address_of(self, peer: int) -> str:
        """What another rank has written: its address, port and secret; empty if it does not listen."""
        if peer not in self._addresses:
            with peer_errors("connecting to the other ranks"):
                self._addresses[peer] = self._store.get(f"{peer}").decode()
        return self._addresses[peer]

    def name_of(self, peer: int) -> int:
        """What messages call a rank."""
        return peer if self._names is None else self._names[peer]

    def names_of(self, peers: Iterable[int]) -> str:
        """What messages call some ranks."""
        return ", ".join(map(str, sorted({self.name_of(peer) for peer in peers})))

    def blames_this_rank(self, words: str) -> bool:
        return words.startswith(f"rank {self.name_of(self._rank)} ")

    def connect(
        self, peers: Iterable[int], channels: range, deadline: float | None = None
    ) -> dict[Caller, socket.socket]:
        """Connect with other ranks, which must do the same. In the same order of peers, or in any other one.

        Nobody waits for ever: a rank that waits for a call answers all that come, and one that waits for an answer
        waits for a lower rank.

        Args:
            deadline: in seconds of `time.monotonic`, as in all functions below; None: the time-out from now on.

        Returns a socket for each peer and channel, in the order of these. Raises PeerError if a rank can't be reached,
        does not come, or has given up.
        """
        deadline = time.monotonic() + self._timeout.total_seconds() if deadline is None else deadline
        wanted = sorted((peer, channel) for peer in peers for channel in channels)
        for peer, _ in wanted:
            self.address_of(peer)  # for `tell`, too, which does not ask the store: it may be gone then, or silent
        sockets: dict[Caller, socket.socket] = {}
        with ExitStack() as opened:  # closes all sockets after an error
            # Call all lower ranks before waiting for the first answer, so that the round trips overlap.
            called = [who for who in wanted if who[0] < self._rank]
            for who in called:
                with _reaching(f"{self.name_of(who[0])}"):
                    sockets[who] = opened.enter_context(self._call(*who, deadline))
            for who in called:
                with _reaching(f"{self.name_of(who[0])}"):
                    while not _is_answered(sockets[who], deadline):
                        sockets[who].close()
                        time.sleep(_CALL_AGAIN_SECONDS)
                        sockets[who] = opened.enter_context(self._call(*who, deadline))

            # Accept the calls of the higher ranks.
            missing = [who for who in wanted if who[0] > self._rank]
            while missing:
                with _reaching(self.names_of(peer for peer, _ in missing)):
                    who, connection = self._accept(missing, deadline)
                sockets[who] = opened.enter_context(connection)
                missing.remove(who)
            opened.pop_all()
        return {who: sockets[who] for who in wanted}

    def tell(self, words: str, peers: Iterable[int]) -> None:
        """Say why this rank gives up to those of some ranks that it knows. Takes a second at most, raises nothing."""
        message = words.encode()[:_MOST_WORDS_BYTES]
        with suppress(OSError, NczError), ExitStack() as opened:
            poll, calling = select.poll(), {}
            for peer in self._addresses.keys() & set(peers):
                call, hello = self._begun_call(peer)
                calling[opened.enter_context(call).fileno()] = call, hello
                poll.register(call, select.POLLOUT)
            deadline = time.monotonic() + _TELL_SECONDS
            while calling and (left := deadline - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(1000 * left):
                    poll.unregister(descriptor)
                    call, hello = calling.pop(descriptor)
                    with suppress(OSError):
                        call.sendall(hello + message)

    def heard(self, peers: Container[int], seconds: float) -> str | None:
        """What one of some ranks says about why it gave up, or says within so many seconds; None if none does."""
        deadline = time.monotonic() + seconds
        while True:
            for each in self._words:
                if each[0] in peers:
                    self._words.remove(each)
                    return each[1]
            try:
                self._take_call(deadline)
            except (OSError, PeerError):  # the time is over, or the endpoint was closed
                return None

    def close(self, reason: str = "") -> None:
        """Listen no more. Safe to call twice, and from any thread: one that waits for a call gets a PeerError."""
        self._closed = self._closed or reason or "these connections are closed"
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits
        self.drop()

    def drop(self) -> None:
        """Close this process's descriptors. In a fork, the parent goes on."""
        if self._listener is not None:
            self._listener.close()
        for call in self._early.values():
            call.close()
        self._early.clear()

    def _call(self, peer: int, channel: int, deadline: float) -> socket.socket:
        """Connect to a rank, and say hello."""
        host, port, secret = self.address_of(peer).split()
        connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
        try:
            connection.sendall(_HELLO.pack(bytes.fromhex(secret), self._rank, channel))
        except OSError:
            connection.close()
            raise
        return connection

    def _begun_call(self, peer: int) -> tuple[socket.socket, bytes]:
        """A connection with a rank that is under way, and the hello before words."""
        host, port, secret = self.address_of(peer).split()
        call = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        call.setblocking(False)
        call.connect_ex((host, int(port)))
        return call, _HELLO.pack(bytes.fromhex(secret), self._rank, _WORDS)

    def _accept(self, expected: Sequence[Caller], deadline: float) -> tuple[Caller, socket.socket]:
        """Wait for a call of one of the expected. Returns who it is, and the connection. Raises PeerError."""
        while True:
            for who in expected:
                if who in self._early:
                    return who, self._early.pop(who)
            if self._words:
                self.cause = self._words.pop(0)[1]
                raise PeerError(self.cause)
            self._take_call(deadline)

    def _take_call(self, deadline: float) -> None:
        """Wait for one call of another rank, and keep it or its words. All other connections are closed.

        Raises TimeoutError, and PeerError once the endpoint is closed.
        """
        self._listener.settimeout(_left(deadline))
        try:
            call, _ = self._listener.accept()
        except TimeoutError:
            return  # `_left` raises TimeoutError once `deadline` has passed
        except OSError as error:
            raise PeerError(self._closed or str(error)) from error
        limit = min(deadline, time.monotonic() + _HELLO_SECONDS)
        match _hello_of(call, self._secret, limit):
            case rank, channel if channel == _WORDS:
                self._words.append((rank, _words_of(call, limit)))
            case who if who is not None:
                with suppress(OSError):
                    call.sendall(_ANSWER)
                    before, self._early[who] = self._early.get(who, call), call
                    if before is not call:
                        before.close()
                    return
        call.close()


class _reaching(ErrorTranslation):
    """Context in which an OSError becomes PeerError. Its subject names the ranks that can't be reached."""

    __slots__ = ()

    def translated(self, error):
        if not isinstance(error, OSError):
            return None
        return PeerError(
            f"connecting to rank {self.subject} failed: {error}. It has died, or nothing can reach it at the address "
            "of its interface: look at its log, and see GLOO_SOCKET_IFNAME"
        )


def _listener(address: str | None) -> socket.socket | None:
    """A socket that listens at `address`; None if that is not possible."""
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    return None


def _is_answered(connection: socket.socket, deadline: float) -> bool:
    """Wait for the answer to a hello. Returns False if the other rank has closed the connection instead.

    That happens if the hello came too late. Raises TimeoutError.
    """
    while True:
        connection.settimeout(_left(deadline))
        try:
            return connection.recv(len(_ANSWER)) == _ANSWER
        except TimeoutError:
            continue  # `_left` raises TimeoutError once `deadline` has passed
        except OSError:
            return False


def _hello_of(connection: socket.socket, secret: bytes, deadline: float) -> Caller | None:
    """Read the hello of a new connection. Returns None if the secret is wrong, or after `deadline`."""
    hello = _received(connection, _HELLO.size, deadline)
    if len(hello) < _HELLO.size:
        return None
    theirs, *who = _HELLO.unpack(hello)
    return tuple(who) if hmac.compare_digest(theirs, secret) else None


def _words_of(connection: socket.socket, deadline: float) -> str:
    return _received(connection, _MOST_WORDS_BYTES, deadline).decode(errors="replace")


def _received(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """What comes, up to so many bytes: until there are as many, the other end closes the connection, or `deadline`."""
    received = b""
    with suppress(OSError):
        while len(received) < nbytes:
            connection.settimeout(_left(deadline))
            more = connection.recv(nbytes - len(received))
            if not more:
                break
            received += more
    return received


def _left(deadline: float) -> float:
    """Seconds until `deadline`, at most an hour. Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return min(left, _MAX_WAIT_SECONDS)
