"""Bytes that really left through a network interface, as Linux counted them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ...core.errors import NczError

_COUNTERS = Path("/proc/net/dev")
_ABOUT = 0.95  # of the bytes that are expected: fewer are too few


def sent_bytes() -> int | None:
    """Bytes sent since the start, headers included, by every process in this network namespace.

    Counts the interface that GLOO_SOCKET_IFNAME names for gloo, or else all interfaces with the loopback. None if Linux
    does not count, or if there is no such interface.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    wanted = set(names.split(",")) if names else None
    try:
        lines = _COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return None
    counters = {name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines)}
    found = [sent for name, sent in counters.items() if wanted is None or name in wanted]
    return sum(found) if found else None


def namespace() -> str:
    """The same for all processes whose traffic is counted together."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def require_crossing(what: str, link: str, least: int, seen: float | None) -> None:
    """Raise NczError if the counters saw clearly less than `least` bytes go through links of that rate.

    Bytes that the kernel has taken may be counted with the next call, and calls differ a little in size.

    Args:
        seen: bytes that were counted; None where nothing is.
    """
    if seen is None or seen < _ABOUT * least:
        counted = "none that are counted" if seen is None else f"{seen:,.0f}"
        raise NczError(
            f"{what}: {least:,} bytes must go through the links of {link}, and {counted} did: the traffic takes "
            "another way, so its time means nothing; is GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE set to something else?"
        )
