"""All ranks in one process: a thread and real connections for each."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.transport import mesh
from ncz_plugins.core.transport.base import Transport
from ncz_plugins.core.transport.connections import Connections
from ncz_plugins.core.transport.gloo import GlooTransport
from ncz_plugins.core.transport.nccl import NcclTransport

_SECONDS = 60


Opened = tuple[Connections, dist.ProcessGroup | None]  # of a rank; the group where frames travel in rounds
_unused: dict[tuple[int, str], list[Opened]] = {}


def play(
    world_size: int,
    body: Callable[[Transport], object],
    way: str = "mesh",
    reuse: bool = False,
) -> list:
    """What `body` returns on each rank. The first rank that raises decides what is raised.

    Args:
        way: how ranks are connected: "mesh", as few are; "sparse", as many are; "gloo", as those without a mesh;
            or "rounds", in which frames travel as over NCCL, but for the fusing of sends and receives, over gloo.
        reuse: take the connections that such a call left, as making them takes longer than most calls. For bodies that
            neither close them nor leave anything in them.
    """
    kind = (world_size, way)
    store = dist.HashStore()
    opened: list[Opened | None] = (_unused.pop(kind, None) if reuse else None) or [None] * world_size

    def on_rank(rank: int) -> object:
        opened[rank] = opened[rank] or _open(store, rank, world_size, way)
        connections, frames = opened[rank]
        if way == "rounds":
            return body(NcclTransport(connections, [frames], torch.device("cpu")))
        return body(GlooTransport(connections))

    with patch.object(mesh, "MOST_RANKS", 1 if way == "sparse" else mesh.MOST_RANKS):
        results = _in_threads(world_size, on_rank)
    if reuse:
        _unused[kind] = opened
    return results


def play_communicators(world_size: int, config, body: Callable[[Communicator], object]) -> list:
    """What `body` returns on each rank, given a new communicator each. Errors as in `play`."""
    store = dist.HashStore()

    def on_rank(rank: int) -> object:
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, world_size, timedelta(seconds=_SECONDS))
        with Communicator(config, group, store=dist.PrefixStore("communicator", store)) as communicator:
            return body(communicator)

    return _in_threads(world_size, on_rank)


def _in_threads(world_size: int, on_rank: Callable[[int], object]) -> list:
    results: list = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = on_rank(rank)
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _SECONDS
    while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < deadline:
        time.sleep(0.001)
    if errors:
        raise errors[0][1]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def _open(store: dist.Store, rank: int, world_size: int, way: str) -> Opened:
    timeout = timedelta(seconds=_SECONDS)
    connections = Connections(store, rank, world_size, timeout)
    if way == "gloo":
        connections.mesh = connections.frames = None
        connections._open_groups(both_ways=True)
    if way != "rounds":
        return connections, None
    return connections, dist.ProcessGroupGloo(dist.PrefixStore("frames", store), rank, world_size, timeout)


def values(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    """What a rank contributes: Gaussian, the larger the higher the rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).mul_(1 + rank).to(dtype)


def same_bits(tensors: list[torch.Tensor]) -> bool:
    """NaN counts, and -0.0 is not 0.0."""
    first = tensors[0].view(torch.uint8)
    return all(torch.equal(first, other.view(torch.uint8)) for other in tensors[1:])
