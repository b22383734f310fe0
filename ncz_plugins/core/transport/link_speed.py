"""Speed of the network interface that gloo uses, as Linux states it."""

from __future__ import annotations

import functools
from pathlib import Path

from .addresses import gloo_interface, interface_of, own_address


@functools.cache
def gloo_link_gbps() -> float | None:
    """The speed of the network interface that gloo uses, in Gbit/s; None if Linux states none, as for loopback."""
    name = gloo_interface() or interface_of(own_address())
    try:
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if 0 < megabits < 2**31 else None
