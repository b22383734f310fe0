"""Address by which other ranks reach this host. It is the one that gloo would choose."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_LOOPBACK = "127.0.0.1"


def own_address() -> str | None:
    """The IPv4 or IPv6 address of this host, in digits.

    The address is that of the first interface in GLOO_SOCKET_IFNAME, None if that interface has no address. If the
    variable is not set, it is the address of this host's name if it can be used here, else 127.0.0.1.
    """
    if name := gloo_interface():
        return _ipv4(name) or _ipv6(name)
    try:
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    return next((address[0] for family, *_, address in found if _is_usable(family, address)), _LOOPBACK)


def gloo_interface() -> str | None:
    """The first interface in GLOO_SOCKET_IFNAME, or None."""
    return gloo_interfaces()[0] or None


def gloo_interfaces() -> list[str]:
    """All interfaces in GLOO_SOCKET_IFNAME; a single empty name if there are none."""
    named = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    return [name for name in named if name] or [""]


def _ipv4(interface: str) -> str | None:
    """The IPv4 address of an interface, or None."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(found[20:24])


def _ipv6(interface: str) -> str | None:
    """The first IPv6 address of an interface that is not link-local, or None."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if name == interface and not digits.startswith("fe8"):
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None


def _is_usable(family: int, address: tuple) -> bool:
    """Whether a socket of this host can be bound to an address."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
    except OSError:
        return False
    return True
