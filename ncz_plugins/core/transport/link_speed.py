"""The speed of the network interface that gloo uses, as Linux states it."""

from __future__ import annotations

import functools
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


@functools.cache
def gloo_link_gbps() -> float | None:
    """The speed of the network interface that gloo uses, in Gbit/s; None where Linux states none, as for loopback."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    name = names.partition(",")[0] if names else _interface_of_this_host()
    try:
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if 0 < megabits < 2**31 else None


def _interface_of_this_host() -> str | None:
    """The interface whose address this host's name resolves to: gloo's choice unless it is told another."""
    import fcntl  # not on Windows

    try:
        address = socket.gethostbyname(socket.gethostname())
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
