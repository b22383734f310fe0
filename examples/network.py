"""Bytes that really left through a network interface, as the kernel counted them, and a slow link (Linux)."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SLOW_MBITS = 100  # of the slow link: some offices, and what is left of a gigabit that ten share
_SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>, bytes per second; Python has no name for it


def sent_bytes(interface: str) -> int:
    """Bytes transmitted through ``interface`` since it came up, by every process on it, TCP/IP headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])  # eight receive counters come first
    raise ValueError(f"no network interface called {interface!r} in /proc/net/dev; set GLOO_SOCKET_IFNAME to one there")


class SentBytes:
    """A context that adds up what the interface sends inside it; ``total`` is the sum over all uses.

    Barriers on both sides keep other phases of the training out of the figure, so all ranks must enter together.
    The interface is the one that gloo was told to use (GLOO_SOCKET_IFNAME), or the loopback. The loopback carries
    every local rank, so there the figure is the sum over all ranks of one machine.
    """

    def __init__(self, barrier: Callable[[], None]):
        self.barrier = barrier
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.total = 0

    def __enter__(self):
        self.barrier()
        self.total -= sent_bytes(self.interface)

    def __exit__(self, *exception):
        if exception == (None, None, None):  # after an error the other ranks may never come to the barrier
            self.barrier()
            self.total += sent_bytes(self.interface)


def limit_connections(megabits: float) -> None:
    """Let each TCP connection that this process has open send at most `megabits` Mbit/s.

    The kernel paces them, which needs neither root nor a network of one's own. Two ranks that use one connection at a
    time are then as far apart as by a link of that rate. Connections that are opened later have no limit, so call this
    before each step. Raises OSError where the kernel can't do it.
    """
    for connection in _connections():
        with connection:
            _limit(connection, megabits)


def _limit(connection: socket.socket, megabits: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, round(megabits * 1e6 / 8))


def _connections() -> Iterator[socket.socket]:
    """This process's TCP sockets, whoever opened them: gloo's are C++. Each is a copy, for the caller to close."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(descriptor))
        except OSError:  # closed since
            continue
        try:
            copy = socket.socket(fileno=number)
        except OSError:  # no socket
            os.close(number)
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            yield copy
        else:
            copy.close()


def can_limit_connections() -> bool:
    """Whether a limit has an effect here, tried with 2 MiB over a connection of its own in a sixth of a second."""
    nbytes = 2 << 20
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            try:
                _limit(sender, SLOW_MBITS)
            except OSError:
                return False
            started = time.perf_counter()
            threading.Thread(target=sender.sendall, args=(bytes(nbytes),), daemon=True).start()
            receiver.recv(nbytes, socket.MSG_WAITALL)
            return time.perf_counter() - started > 0.5 * 8 * nbytes / (SLOW_MBITS * 1e6)
