"""Bytes that left through a network interface, as counted by Linux."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ...core.errors import NczError

_COUNTERS = Path("/proc/net/dev")
_MIN_SHARE = 0.95  # smallest accepted share of the expected bytes


def sent_bytes() -> int | None:
    """Bytes sent so far by all processes of this network namespace, headers included.

    Counts the interfaces that GLOO_SOCKET_IFNAME names, or else all interfaces including the loopback. None if the
    system does not count, or there is no such interface.
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
    """Name of this network namespace. Processes with the same name are counted together."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def require_crossing(what: str, link: str, least: int, seen: float | None) -> None:
    """Raise NczError if clearly less than `least` bytes went through the links.

    Some tolerance is needed: the kernel may count bytes with the next call, and calls differ a little in size.

    Args:
        what: what was sent, for the message.
        link: rate of the links, for the message.
        least: bytes that must go through the links.
        seen: bytes that were counted; None if nothing is counted.
    """
    if seen is None or seen < _MIN_SHARE * least:
        counted = "no bytes are counted" if seen is None else f"only {seen:,.0f} did"
        raise NczError(
            f"{what}: {least:,} bytes must go through the links of {link}, but {counted}: the traffic takes another "
            "way, so its time means nothing; is GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE set to something else?"
        )
