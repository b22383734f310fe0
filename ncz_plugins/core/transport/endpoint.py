"""Where a rank listens, and how ranks connect: the higher of two ranks calls the lower one.

A rank writes its address to the store, and reads those of the ranks that it connects with. A call begins with a secret
of the rank that is called, so that nobody else gets in, and is answered. Ranks that gave up call as well, to say why.

A rank that connects waits for all of that at once: for calls, for answers to its own, and for words. It notices that a
lower rank has died by its call, and that a higher one has by a connection that says nothing.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import NczError, PeerError
from ..runtime.process import drop_in_forks
from .addresses import gloo_interface, own_address
from .base import peer_errors

_HELLO = struct.Struct("<16sqq")  # first bytes of a connection: secret of the rank that is called, own rank, channel
_HELLO_SECONDS = 5.0  # time-out for the hello of a new connection
_CALL_AGAIN_SECONDS = 0.1
_ANSWER = b"\n"  # the answer to a valid hello
_MAX_TURN_SECONDS = 1.0  # where the system does not wake up a thread whose sockets another one shuts down
_WORDS = -1  # in place of a channel: words follow, and the connection ends
_WATCH = -2  # in place of a channel: a connection that says nothing, and ends with the process at the other end
_WATCH_SECONDS = 1.0  # between two of them
_MOST_WORDS_BYTES = 1000
_TELL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.5  # for the words of a rank that can't be reached any more; they were sent before
_BACKLOG = 4096  # calls that may wait to be accepted; the system may allow fewer
_MOST_SILENT = 64  # accepted connections that have not said hello; of more, the oldest ones are closed

# An option of Linux that Python has no name for in every version: `bind` chooses no port yet.
_IP_BIND_ADDRESS_NO_PORT = 24

_CLOSED = "these connections are closed"

Caller = tuple[int, int]  # rank and channel
_Failure = tuple[list[int], OSError]  # ranks that can't be called, and why


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
        self._pending: dict[int, _Pending] = {}  # all other connections, by descriptor: each is yet to say more
        self._due: dict[Caller, float] = {}  # when this rank calls next, in seconds of `time.monotonic`
        self._words: list[tuple[int, str]] = []
        self._poll = select.poll()  # of the listener and what is pending
        self._lock = threading.RLock()  # held while sockets are used, so that no other thread closes them
        self._closed: str | None = None  # why it was closed
        address = None if os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS" else own_address()
        self._listener = _listener(address)
        own = ""
        if self._listener is not None:
            self._listener.setblocking(False)
            self._poll.register(self._listener, select.POLLIN)
            own = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}"
        drop_in_forks(self)
        with peer_errors("connecting to the other ranks"):
            store.set(f"{rank}", own)

    @property
    def listens(self) -> bool:
        """Whether others can call this rank: it has an address, and gloo is not told to encrypt, as only gloo does."""
        return self._listener is not None

    @property
    def known(self) -> list[int]:
        """The ranks that this one was to connect with, or that have called it while it connected."""
        return list(self._addresses)

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

    def connect(
        self, peers: Iterable[int], channels: range, deadline: float | None = None
    ) -> dict[Caller, socket.socket]:
        """Connect with other ranks, which must do the same. In the same order of peers, or in any other one.

        Nobody waits in a circle: a rank answers all calls that come while it waits.

        Args:
            deadline: in seconds of `time.monotonic`; None: the time-out from now on.

        Returns a socket for each peer and channel, in the order of these. Raises PeerError if a rank does not come in
        time, if nothing listens at its address any more, which takes a second or two to notice, if a rank has given up,
        and once the endpoint is closed. A store that does not answer for addresses is waited for as long as it says.
        """
        deadline = time.monotonic() + self._timeout.total_seconds() if deadline is None else deadline
        wanted = sorted((peer, channel) for peer in peers for channel in channels)
        for peer, _ in wanted:
            self.address_of(peer)  # for `tell`, too, which does not ask the store: it may be gone then, or silent
        # Call all lower ranks before waiting for the first answer, so that the round trips overlap.
        now = time.monotonic()
        self._due = {who: now for who in wanted if who[0] < self._rank}
        self._due |= {(peer, _WATCH): now + _WATCH_SECONDS for peer, _ in wanted if peer > self._rank}
        try:
            while missing := [who for who in wanted if who not in self._early]:
                if (words := self.heard(None, 0)) is not None:
                    raise self._given_up(words)
                if time.monotonic() > deadline:
                    raise self._unreachable([peer for peer, _ in missing])
                if (failed := self._call_due(missing) or self._turn(self._seconds_until_due(deadline))) is not None:
                    raise self._unreachable(*failed)
                self._learn_addresses()
            with self._lock:
                self._require_open()
                return {who: self._early.pop(who) for who in wanted}
        finally:
            with self._lock:
                for call in [call for call in self._pending.values() if call.is_own]:
                    self._hang_up(call)

    def tell(self, words: str, peers: Iterable[int]) -> None:
        """Say why this rank gives up to those of some ranks that it knows. Takes a second at most, raises nothing."""
        message = words.encode()[:_MOST_WORDS_BYTES]
        with suppress(OSError, NczError), ExitStack() as opened:
            poll, calling = select.poll(), {}
            for peer in set(self.known) & set(peers):
                with suppress(OSError):
                    call, hello = self._begun_call(peer, _WORDS)
                    calling[opened.enter_context(call).fileno()] = call, hello
                    poll.register(call, select.POLLOUT)
            deadline = time.monotonic() + _TELL_SECONDS
            while calling and (left := deadline - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(1000 * left):
                    poll.unregister(descriptor)
                    call, hello = calling.pop(descriptor)
                    with suppress(OSError):
                        call.sendall(hello + message)

    def heard(self, peers: Container[int] | None, seconds: float) -> str | None:
        """Why a rank of `peers` gave up, in its own words. Waits up to `seconds`; None if no rank says anything.

        Words that blame this rank are skipped: their sender only waited for it.

        Args:
            peers: None: any rank.
        """
        deadline = time.monotonic() + seconds
        while True:
            for each in self._words:
                if (peers is None or each[0] in peers) and not self._is_blamed_by(each[1]):
                    self._words.remove(each)
                    return each[1]
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                self._turn(left)
            except PeerError:  # the endpoint was closed
                return None

    def close(self, reason: str = "") -> None:
        """Listen no more. Safe to call twice, and from any thread: one that waits for others gets a PeerError."""
        self._closed = self._closed or reason or _CLOSED
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits
        with self._lock:
            self.drop()

    def drop(self) -> None:
        """Close this process's descriptors. In a fork, the parent goes on."""
        self._closed = self._closed or _CLOSED
        for each in (self._listener, *self._early.values(), *[call.socket for call in self._pending.values()]):
            if each is not None:
                each.close()
        self._early.clear()
        self._pending.clear()

    def _require_open(self) -> None:
        if self._closed is not None:
            raise PeerError(self._closed)

    def _is_blamed_by(self, words: str) -> bool:
        return words.startswith(f"rank {self.name_of(self._rank)} ")

    def _given_up(self, words: str) -> PeerError:
        """The error because another rank has given up. `Connections` passes its words on."""
        self.cause = words
        return PeerError(words)

    def _unreachable(self, peers: Iterable[int], error: OSError | None = None) -> PeerError:
        """The error of ranks that can't be reached. Its first cause, if they or others say it.

        Args:
            error: None: the time is over.
        """
        words = self.heard(None, _LAST_WORDS_SECONDS)
        self._require_open()  # else an end of our own would be blamed on the peer
        if words is None and error is not None and self._words:
            words = self._words[0][1]  # that this rank was too late
        if words is not None:
            return self._given_up(words)
        if error is None:
            return PeerError(
                f"rank {self.names_of(peers)} has not connected within the time-out of "
                f"{self._timeout.total_seconds():g} s. It hangs, is cut off, or is far behind: look at its log, see "
                "GLOO_SOCKET_IFNAME, and raise transport.timeout_seconds if it was only slow."
            )
        return PeerError(
            f"rank {self.names_of(peers)} can't be reached: {error}. It has died, or nothing can reach it at the "
            "address of its interface: look at its log, and see GLOO_SOCKET_IFNAME"
        )

    def _learn_addresses(self) -> None:
        """Read the addresses of ranks that have called: `tell` takes those that are known."""
        for peer in {peer for peer, _ in list(self._early)}.difference(self._addresses):
            with suppress(PeerError), peer_errors("connecting to the other ranks"):
                if self._store.check([f"{peer}"]):  # else it is no rank
                    self.address_of(peer)

    # ------------------------------------------------------------ calls of this rank

    def _call_due(self, missing: Sequence[Caller]) -> _Failure | None:
        """Begin the calls that are due, to ranks that are missing. Returns the first that fails."""
        now, peers = time.monotonic(), {peer for peer, _ in missing}
        with self._lock:
            self._require_open()
            for who in [who for who, due in self._due.items() if due <= now]:
                del self._due[who]
                if who[0] not in peers:
                    continue
                try:
                    opened, hello = self._begun_call(*who)
                except OSError as error:
                    if (failed := self._failed(who, error)) is not None:
                        return failed
                else:
                    self._await(_Pending(opened, who, hello), select.POLLOUT)
        return None

    def _seconds_until_due(self, deadline: float) -> float:
        return max(0.0, min([deadline, *self._due.values()]) - time.monotonic())

    def _begun_call(self, peer: int, channel: int) -> tuple[socket.socket, bytes]:
        """A connection with a rank that is under way, and what to say once it is there."""
        host, port, secret = self.address_of(peer).split()
        family, *_, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        call = socket.socket(family)
        call.setblocking(False)
        if gloo_interface() and family == self._listener.family:
            # So that what this rank sends leaves by the interface that was named for it, if the host routes by source.
            with suppress(OSError):  # another port than the kernel would choose costs nothing but ports
                call.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            call.bind((self._listener.getsockname()[0], 0))
        code = call.connect_ex(place)
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            call.close()
            raise OSError(code, os.strerror(code))
        return call, b"" if channel == _WATCH else _HELLO.pack(bytes.fromhex(secret), self._rank, channel)

    def _failed(self, who: Caller, error: OSError) -> _Failure | None:
        """The failure of a call to a rank. A watch only fails if nothing listens there."""
        peer, channel = who
        if channel != _WATCH or error.errno == errno.ECONNREFUSED:
            return [peer], error
        self._due[who] = time.monotonic() + _WATCH_SECONDS
        return None

    def _follow(self, call: _Pending) -> _Failure | None:
        """Say hello in a call of this rank that is connected now, or take the answer."""
        if call.hello is not None:
            if code := call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._hang_up(call)
                return self._failed(call.who, OSError(code, os.strerror(code)))
            hello, call.hello = call.hello, None
            with suppress(OSError):  # it will look like the end of the connection
                call.socket.sendall(hello)
            self._poll.modify(call.socket, select.POLLIN)
        elif (answer := _some(call.socket, len(_ANSWER))) == _ANSWER:
            self._keep(call)
        elif answer is not None:
            # The other rank took too long to read the hello, or has died: then the next call is refused.
            self._hang_up(call)
            again = _WATCH_SECONDS if call.who[1] == _WATCH else _CALL_AGAIN_SECONDS
            self._due[call.who] = time.monotonic() + again
        return None

    # ------------------------------------------------------------ all that may come

    def _turn(self, seconds: float) -> _Failure | None:
        """Wait up to so many seconds, or less, for what comes next: calls and what they say, and answers.

        Returns a call of this rank that has failed; None: there is none. Raises PeerError once the endpoint is closed.
        """
        failed = None
        with self._lock:
            self._require_open()
            for descriptor, _ in self._poll.poll(1000 * min(seconds, _MAX_TURN_SECONDS)):
                self._require_open()
                call = self._pending.get(descriptor)
                if descriptor == self._listener.fileno():
                    self._accept()
                elif call is not None and call.is_own:
                    failed = failed or self._follow(call)
                elif call is not None:
                    self._listen_to(call)
            self._close_silent()
        return failed

    def _accept(self) -> None:
        """Accept all calls that have come."""
        while True:
            try:
                opened, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                raise PeerError(self._closed or f"accepting the calls of other ranks failed: {error}") from error
            opened.setblocking(False)
            self._await(_Pending(opened, until=time.monotonic() + _HELLO_SECONDS), select.POLLIN)

    def _listen_to(self, call: _Pending) -> None:
        """Hear more of a call that came: its hello, and words if these follow. Without a valid hello it is closed."""
        limit = _HELLO.size + _MOST_WORDS_BYTES if call.said_hello else _HELLO.size
        more = _some(call.socket, limit - len(call.heard))
        if more is None:
            return
        call.heard += more
        if not more or len(call.heard) == _HELLO.size + _MOST_WORDS_BYTES:
            if call.said_hello:
                self._words.append((call.who[0], call.heard[_HELLO.size :].decode(errors="replace")))
            self._hang_up(call)
        elif len(call.heard) == _HELLO.size and not call.said_hello:
            theirs, *who = _HELLO.unpack(call.heard)
            is_known, (rank, channel) = hmac.compare_digest(theirs, self._secret), who
            if not is_known or (channel != _WORDS and rank <= self._rank):  # lower ranks are called
                return self._hang_up(call)
            call.who = rank, channel
            if channel != _WORDS:
                self._answer(call)

    def _answer(self, call: _Pending) -> None:
        try:
            call.socket.sendall(_ANSWER)
        except OSError:  # it has gone; it calls again if it is still there
            self._hang_up(call)
        else:
            self._keep(call)

    def _close_silent(self) -> None:
        """Close calls that have said nothing for too long, and the oldest ones if there are too many."""
        now, silent = time.monotonic(), [call for call in self._pending.values() if not call.is_own]
        for number, call in enumerate(silent):
            if call.until < now or number < len(silent) - _MOST_SILENT:
                self._hang_up(call)

    def _await(self, call: _Pending, event: int) -> None:
        self._pending[call.socket.fileno()] = call
        self._poll.register(call.socket, event)

    def _forget(self, call: _Pending) -> None:
        del self._pending[call.socket.fileno()]
        self._poll.unregister(call.socket)

    def _hang_up(self, call: _Pending) -> None:
        self._forget(call)
        call.socket.close()

    def _keep(self, call: _Pending) -> None:
        """Keep a connection for `connect`, in place of an earlier one with the same rank and channel."""
        self._forget(call)
        before = self._early.pop(call.who, None)
        self._early[call.who] = call.socket
        if before is not None:
            before.close()


class _Pending:
    """Connection on which something is yet to come.

    Args:
        who: the rank and channel that this rank calls; None: a call that came, whose hello will say it.
        hello: what this rank will say once it is connected; None: nothing.
        until: when the connection is closed unless it has said all, in seconds of `time.monotonic`.

    Attributes:
        is_own: whether this rank calls.
        heard: what has come.
    """

    def __init__(
        self, opened: socket.socket, who: Caller | None = None, hello: bytes | None = None, until: float = math.inf
    ):
        self.socket = opened
        self.who = who
        self.hello = hello
        self.until = until
        self.is_own = who is not None
        self.heard = b""

    @property
    def said_hello(self) -> bool:
        """Whether a call that came has said a valid hello."""
        return self.who is not None


def _listener(address: str | None) -> socket.socket | None:
    """A socket that listens at `address`; None if that is not possible."""
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    return None


def _some(connection: socket.socket, nbytes: int) -> bytes | None:
    """What has come, at most so many bytes; none at the end of the connection; None: nothing has come yet."""
    try:
        return connection.recv(nbytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
