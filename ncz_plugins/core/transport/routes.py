"""Routes: the transport and the device for the tensors on each torch device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import PeerError, UnsupportedError, forget_tensors, refused
from ..runtime.device import HOST, Device, Gpu, Host, has_spare_core
from .base import Transport, peer_errors
from .connections import Connections
from .descriptors import shortage_of_descriptors
from .gloo import GlooTransport
from .handshake import store_of_own
from .nccl import NcclTransport, open_nccl, require_healthy
from .striped import MOST_GROUPS

# Between two looks whether the peer of a message has come, at first and at most.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.001, 0.05


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
        names: what messages call each rank; None: its number here.

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
        names: Sequence[int] | None = None,
    ):
        self._store = store
        self._nccl_groups = min(nccl_groups, MOST_GROUPS)
        self._nccl_class = nccl_class
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._channels = channels
        self._names = names
        self._routes: dict[torch.device, Route] = {}
        self._connect()

    def _connect(self) -> None:
        """Connect the hosts."""
        place = self._store, self._rank, self._world_size, self._timeout, self._channels, self._names
        self._connections = Connections(*place)
        self._routes[HOST] = Route(Host(has_spare_core()), GlooTransport(self._connections))

    def of(self, device: torch.device) -> Route:
        """The route of tensors on `device`. The first call for a GPU connects the GPUs: all ranks must make it.

        Raises UnsupportedError if torch has no NCCL, ImportError if there are no kernels for the device, and PeerError
        if a rank does not come or the routes were closed.
        """
        if self._closed:
            raise _closed()
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


class OneWayRoutes(Routes):
    """Routes of messages from one rank to another. The first call connects them, on the thread that runs it.

    Each of the two ranks makes one, at any time.

    Args:
        store: the store at which the two ranks meet. Nothing else may use it under the same prefix.
        names: the global ranks of source and destination.
        rank: 0 on the source, 1 on the destination.
        timeout: see `Routes`.
        between_all: the transport between all ranks of the communicator. It tells the speed of the link, and whether
            the peer is still there.
        peer: the peer's rank in `between_all`.
        nccl_class: see `Routes`.
    """

    def __init__(
        self,
        store: dist.Store,
        names: Sequence[int],
        rank: int,
        timeout: timedelta,
        between_all: GlooTransport,
        peer: int,
        nccl_class: type | None = None,
    ):
        self._between_all: GlooTransport | None = between_all
        self._peer = peer
        super().__init__(store, rank, 2, timeout, between_all.channels, nccl_class=nccl_class, names=names)

    def of(self, device: torch.device) -> Route:
        """See `Routes.of`. Raises PeerError if the peer makes no call in time, MismatchError if it has refused to."""
        if self._between_all is not None and not self._closed:
            try:
                self._open()
            except PeerError:
                if self._was_refused():  # and the peer has left since, wherever both were on the way
                    raise refused("send_recv", self._names[1 - self._rank]) from None
                raise
        if device not in self._routes:
            self._store = store_of_own(self._store)  # NCCL waits in it
        return super().of(device)

    def note_refusal(self) -> None:
        """Leave word that this rank can't make its call, for a peer that comes after this rank has left."""
        if self._between_all is not None:
            with peer_errors(f"telling rank {self._names[1 - self._rank]}"):
                self._store.set(f"refused {self._rank}", "")

    def _was_refused(self) -> bool:
        """Whether the peer has left word that it can't make its call."""
        with suppress(RuntimeError):  # the store has gone, too
            return self._store.check([f"refused {1 - self._rank}"])
        return False

    def _connect(self) -> None:
        """Nothing is connected before the first call."""

    def _open(self) -> None:
        """Connect with the peer, once it makes its first call."""
        if refusal := shortage_of_descriptors(self._channels, 2):
            raise UnsupportedError(refusal)
        store = store_of_own(self._store)  # which ends with this method
        peer = self._names[1 - self._rank]
        with peer_errors(f"meeting rank {peer}"):
            store.set(f"here {self._rank}", "")
            self._await(store, [f"here {1 - self._rank}"])
        place = store, self._rank, 2, self._timeout, self._channels, self._names
        connections = Connections(*place, one_way=self._await)
        known, self._between_all = self._between_all, None
        transport = GlooTransport(connections)
        transport.link_gbps, transport.trip_seconds = known.link_gbps, known.trip_seconds
        with self._lock:  # another thread may have closed these routes
            if not self._closed:
                self._connections = connections
                self._routes[HOST] = Route(Host(), transport)
                return
        connections.close()
        raise _closed()

    def _await(self, store: dist.Store, keys: list[str]) -> None:
        """Wait for what the peer writes to the store.

        Not by a wait of the store: nothing ends it, and nobody else can use the store meanwhile, such as another
        direction between the same ranks, whose peer would wait as well.

        Raises PeerError after the time-out, and if the peer has left or these routes were closed.
        """
        peer, missing = self._names[1 - self._rank], ("recv", "send")[self._rank]
        seconds, pause = self._timeout.total_seconds(), _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + seconds
        while not store.check(keys):
            if self._closed:
                raise _closed()
            if self._between_all.has_left(self._peer):
                raise PeerError(f"rank {peer} has closed its connections: it died, left, or met an error")
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {peer} called no {missing} within {seconds:g} s. Ranks that both begin by send, or both by "
                    "recv, wait for each other: use isend, irecv or batch_isend_irecv"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _closed() -> PeerError:
    return PeerError("these connections are closed")
