"""Which transport and device serve the tensors on each torch device."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import PeerError, forget_tensors
from ..runtime.device import Device, Gpu, Host, has_spare_core
from .base import Transport
from .connections import Connections
from .gloo import GlooTransport
from .nccl import NcclTransport, open_nccl, require_healthy
from .striped import MOST_GROUPS


class Route(NamedTuple):
    """What serves the tensors on one torch device."""

    device: Device
    transport: Transport


def _open_group(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta, number: int
) -> dist.ProcessGroup:
    """An NCCL group, of those between the same GPUs the one with this number."""
    return open_nccl(dist.PrefixStore(f"group {number}", store), rank, world_size, device, timeout)


class Routes:
    """The connections of one group's ranks, and a route for each torch device. It owns all of them.

    All ranks must make one, which connects their hosts. GPUs are connected when they are first used.

    Args:
        store: what the ranks meet at; nobody else may use it under the same prefix.
        rank: this rank within the group.
        timeout: how long to wait for a peer, when connecting and in each operation.
        channels: see `Connections`.
        nccl_groups: over which GPUs send large gathers, as long as none measures how many are best.

    Raises UnsupportedError where torch has no gloo, and PeerError if the other ranks don't come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        channels: int = 1,
        nccl_groups: int = 1,
    ):
        self._store = store
        self._nccl_groups = min(nccl_groups, MOST_GROUPS)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._connections = Connections(store, rank, world_size, timeout, channels)
        host = Route(Host(has_spare_core()), GlooTransport(self._connections))
        self._routes: dict[torch.device, Route] = {torch.device("cpu"): host}

    def of(self, device: torch.device) -> Route:
        """The route of tensors on `device`. The first call for a GPU connects the GPUs of all ranks, who must all call.

        Raises UnsupportedError where torch has no NCCL, ImportError where there are no kernels for the device, and
        PeerError if a rank does not come or the routes were closed.
        """
        if self._closed:
            raise PeerError("these connections are closed")
        if device not in self._routes:
            store = dist.PrefixStore(f"nccl {len(self._routes)}", self._store)
            # Without a reference to this object, which it would keep, and all connections open.
            open_group = partial(_open_group, store, self._rank, self._world_size, device, self._timeout)
            groups = [open_group(number) for number in range(self._nccl_groups)]
            gpu = Gpu(device, self._timeout, partial(require_healthy, groups))
            self._routes[device] = Route(gpu, NcclTransport(self._connections, groups, device, open_group))
        return self._routes[device]

    def close(self) -> None:
        """Close all connections, when nothing is under way any more. What was sent still arrives.

        Safe to call twice, from any thread, and in a fork, which has no part in the connections.
        """
        with ExitStack() as stack:  # the first transport last, as the others use its connections; and all in any case
            for route in self._taken():
                stack.callback(route.transport.close)

    def abort(self, error: BaseException) -> None:
        """After `error`, close all connections at once, so that peers that wait for this rank get an error.

        Args:
            error: whoever keeps it does not keep the tensors of the call that failed: its frames are cleared.
        """
        with ExitStack() as stack:
            for route in self._taken():
                stack.callback(route.transport.abort, error)
        forget_tensors(error)

    def _taken(self) -> list[Route]:
        """All routes, for whoever closes them; none once that was done."""
        with self._lock:
            self._closed = True
            routes, self._routes = list(self._routes.values()), {}
        return routes
