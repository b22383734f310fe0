"""File descriptors that this process may still open. Gloo ends a process that runs out of them."""

from __future__ import annotations

import os
import resource

_SPARE_DESCRIPTORS = 8  # for short uses: a listener, sockets that look for an address


def shortage_of_descriptors(needed: int, world_size: int) -> str | None:
    """Error message, with a remedy, if this process may not open enough descriptors; None if it may.

    Args:
        needed: descriptors that the connections between `world_size` ranks take in this process.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, needed = _used(limit), needed + _SPARE_DESCRIPTORS
    if limit == resource.RLIM_INFINITY or used is None or used + needed <= limit:
        return None
    enough = 1 << (used + needed - 1).bit_length()
    if most == resource.RLIM_INFINITY or enough <= most:
        remedy = f"run `ulimit -n {enough}` before the program starts (the hard limit allows it)"
    else:
        remedy = f"raise the hard limit from {most} to {enough}, which takes the rights of root"
    return (
        f"connecting {world_size} ranks takes up to {needed} file descriptors, and {used} of the {limit} that this "
        f"process may have (`ulimit -n`) are in use: {remedy}, or close communicators that are no longer needed"
    )


def _used(limit: int) -> int | None:
    """The number of open descriptors below `limit`; None if the system does not tell."""
    try:
        return sum(int(number) < limit for number in os.listdir("/dev/fd"))
    except FileNotFoundError:
        return None
    except OSError:  # no descriptor is left to open /dev/fd with
        return limit
