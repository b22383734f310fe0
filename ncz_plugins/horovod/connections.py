"""Connections of our own beside Horovod's, for the schedules ring and halving and for tensors on GPUs.

The ranks of a process set find each other through Horovod. They connect by gloo and, once a tensor is on a GPU, by
NCCL. So a Horovod that was built without CUDA serves GPUs as well.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import horovod.torch as hvd
import torch

from ..core.config import TransportConfig
from ..core.transport.handshake import open_store
from ..core.transport.routes import Route, Routes

_DEFAULT_TIMEOUT = timedelta(minutes=5)


class OwnConnections:
    """Connections of one process set. The first use opens them. A failure closes them; the next use opens new ones."""

    def __init__(self):
        self._routes: Routes | None = None

    @contextmanager
    def route(self, process_set, settings: TransportConfig, device: torch.device) -> Iterator[Route]:
        """Context with the device and the transport for tensors on `device`.

        All ranks of the process set must enter it.

        An error inside closes all connections, so that other ranks fail at once and need not time out.

        Args:
            settings: time-out of connecting (default: five minutes), and the number of connections.

        Raises PeerError if a rank does not connect, and what `Routes.of` raises.
        """
        if self._routes is None:
            self._routes = _open(process_set, settings)
        try:
            yield self._routes.of(device)
        except BaseException as error:
            routes, self._routes = self._routes, None
            routes.abort(error)
            raise

    def close(self) -> None:
        """Close the connections, once no call is under way."""
        if self._routes is not None:
            self._routes.close()

    def abort(self, error: BaseException) -> None:
        """Close the connections at once. Calls under way fail."""
        if self._routes is not None:
            self._routes.abort(error)


def _open(process_set, settings: TransportConfig) -> Routes:
    rank, world_size = process_set.rank(), process_set.size()
    seconds = settings.timeout_seconds
    timeout = _DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
    channels = 1 if settings.connections == "auto" else settings.connections
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()  # horovodrun sets it
    broadcast = partial(hvd.broadcast, root_rank=process_set.ranks[0], name="ncz.ring", process_set=process_set)
    return Routes(open_store(rank, world_size, timeout, host, broadcast), rank, world_size, timeout, channels, channels)
