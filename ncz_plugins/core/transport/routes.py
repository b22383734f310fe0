"""Routes: the transport and the device for the tensors on each torch device."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import PeerError, forget_tensors
from ..runtime.device import HOST, Device, Gpu, Host, has_spare_core
from .base import Transport
from .connections import Connections
from .gloo import GlooTransport
from .nccl import NcclTransport, open_nccl, require_healthy
from .striped import MOST_GROUPS


class Route(NamedTuple):
    """Device and transport for the tensors on one torch device."""

    device: Device
    transport: Transport


class Routes:
    """Owner of the connections between the ranks of one group, with a route for each torch device.

    All ranks must make one at the same time, which connects their hosts. GPUs are connected when they are first used.

    Args:
        store: the store at which the ranks meet. Nothing else may use it under the same prefix.
        rank: this rank within the group.
        world_size: the number of ranks.
        timeout: how long to wait for a peer, when connecting and in each operation.
        channels: see `Connections`.
        nccl_groups: NCCL groups for large gathers and exchanges, unless `Transport.use_groups` changes it.
        nccl_class: the class of these groups, see `make_nccl_group`.

    Raises UnsupportedError if torch has no gloo, and PeerError if the other ranks don't come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        channels: int = 1,
        nccl_groups: int = 1,
        nccl_class: type | None = None,
    ):
        self._store = store
        self._nccl_groups = min(nccl_groups, MOST_GROUPS)
        self._nccl_class = nccl_class
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._connections = Connections(store, rank, world_size, timeout, channels)
        host = Route(Host(has_spare_core()), GlooTransport(self._connections))
        self._routes: dict[torch.device, Route] = {HOST: host}

    def of(self, device: torch.device) -> Route:
        """The route of tensors on `device`. The first call for a GPU connects the GPUs: all ranks must make it.

        Raises UnsupportedError if torch has no NCCL, ImportError if there are no kernels for the device, and PeerError
        if a rank does not come or the routes were closed.
        """
        if self._closed:
            raise PeerError("these connections are closed")
        if device not in self._routes:
            store = dist.PrefixStore(f"nccl {len(self._routes)}", self._store)
            rank, world_size, timeout, nccl_class = self._rank, self._world_size, self._timeout, self._nccl_class

            # Does not refer to this object: the transport would keep it, and all connections open.
            def open_group(number: int) -> dist.ProcessGroup:
                its_store = dist.PrefixStore(f"group {number}", store)
                return open_nccl(its_store, rank, world_size, device, timeout, nccl_class)

            groups = [open_group(number) for number in range(self._nccl_groups)]
            gpu = Gpu(device, timeout, lambda: require_healthy(groups))
            self._routes[device] = Route(gpu, NcclTransport(self._connections, groups, device, open_group))
        return self._routes[device]

    def further_groups(self, device: torch.device) -> list[dist.ProcessGroup]:
        """The NCCL groups of a GPU behind the first: those that carry parts of what is large. Raises as `of` does.

        Where these settings ask for one group, and nobody asked for more, GPUs are not connected for it.
        """
        if self._nccl_groups == 1 and device not in self._routes:
            return []
        transport = self.of(device).transport
        return transport.further_groups if isinstance(transport, NcclTransport) else []

    def close(self) -> None:
        """Close all connections, when nothing is under way any more. What was sent still arrives.

        Safe to call twice, and from any thread. In a fork it does nothing.
        """
        # All are closed even if one raises; the first transport last, as the others use its connections.
        with ExitStack() as stack:
            for route in self._take_all():
                stack.callback(route.transport.close)

    def abort(self, error: BaseException) -> None:
        """Close all connections at once, so that peers that wait for this rank get an error.

        Args:
            error: the error that happened. The frames of its traceback are cleared, so it keeps no tensors.
        """
        with ExitStack() as stack:
            routes = self._take_all()
            for route in routes:  # these come last: peers must not wait for them
                stack.callback(route.device.settle)
            for route in routes:
                stack.callback(route.transport.abort, error)
        forget_tensors(error)

    def _take_all(self) -> list[Route]:
        """Remove and return all routes."""
        with self._lock:
            self._closed = True
            routes, self._routes = list(self._routes.values()), {}
        return routes
