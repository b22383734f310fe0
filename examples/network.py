"""Bytes that really left through a network interface, as the kernel counted them (Linux)."""

import os
from collections.abc import Callable
from pathlib import Path


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
