"""Connections of our own beside Horovod: for the ring schedule, and for tensors on GPUs.

The ranks of a process set meet through Horovod. They connect by gloo and, once a GPU is used, by NCCL. So a Horovod
that was built for CPUs serves GPUs as well.
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

_TIMEOUT = timedelta(minutes=5)


class OwnConnections:
    """Those of one process set, made when they are first used. A failure closes them, and the next use makes others."""

    def __init__(self):
        self._routes: Routes | None = None

    @contextmanager
    def route(self, process_set, settings: TransportConfig, device: torch.device) -> Iterator[Route]:
        """What serves tensors on `device`. All ranks of the process set must enter this alike.

        An error that passes through closes all connections, so that other ranks need not time out.

        Args:
            settings: how long to wait for a peer, five minutes if it does not say, and with how many connections.

        Raises PeerError if a rank does not come, and what `Routes.of` does.
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
        """Close what was made, when nothing is under way any more."""
        if self._routes is not None:
            self._routes.close()

    def abort(self, error: BaseException) -> None:
        """Close what was made at once: what is under way fails."""
        if self._routes is not None:
            self._routes.abort(error)


def _open(process_set, settings: TransportConfig) -> Routes:
    rank, world_size = process_set.rank(), process_set.size()
    seconds = settings.timeout_seconds
    timeout = _TIMEOUT if seconds is None else timedelta(seconds=seconds)
    channels = 1 if settings.connections == "auto" else settings.connections
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()  # horovodrun sets it
    broadcast = partial(hvd.broadcast, root_rank=process_set.ranks[0], name="ncz.ring", process_set=process_set)
    return Routes(open_store(rank, world_size, timeout, host, broadcast), rank, world_size, timeout, channels, channels)
