"""How the tensors of each device reach the other ranks."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..runtime.device import Device, Gpu, Host, has_spare_core
from .base import Transport
from .gloo import Connections, GlooTransport
from .nccl import NcclTransport, open_nccl, require_healthy


class Route(NamedTuple):
    device: Device
    transport: Transport


class Routes:
    def __init__(self, connections: Connections, store: dist.Store, timeout: timedelta):
        self._connections = connections
        self._store = store
        self._timeout = timeout
        self.host = Route(Host(has_spare_core()), GlooTransport(connections))
        self._routes = {torch.device("cpu"): self.host}

    def of(self, device: torch.device) -> Route:
        if device not in self._routes:
            store = dist.PrefixStore(f"nccl {len(self._routes)}", self._store)
            group = open_nccl(store, self._connections.rank, self._connections.world_size, device, self._timeout)
            gpu = Gpu(device, self._timeout, partial(require_healthy, group))
            self._routes[device] = Route(gpu, NcclTransport(self._connections, group, device))
        return self._routes[device]

    def close(self) -> None:
        for _, transport in self._routes.values():
            transport.close()

    def abort(self, error: BaseException) -> None:
        for _, transport in self._routes.values():
            transport.abort(error)
