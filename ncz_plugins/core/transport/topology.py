"""Which ranks share a node, and which a machine."""

from __future__ import annotations

import json
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ..errors import ConfigError
from ..runtime.statistics import Counters
from .base import FrameStream, FrameTransport, Transport, peer_errors
from .forecast import Forecasts
from .subset import SubsetCollectives


@dataclass(frozen=True)
class Nodes:
    """Which ranks share a node, as one of them sees it.

    Attributes:
        ranks: the ranks of each node, [nodes][local ranks]; all nodes have equally many.
        node: the node of this rank.
        local_rank: this rank's position among the ranks of its node.
        processes: the process id of each neighbor if this rank can read their memory, else None.
    """

    ranks: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int
    processes: dict[int, int] | None = None

    @property
    def neighbors(self) -> list[int]:
        """The other ranks of this node."""
        return [rank for local_rank, rank in enumerate(self.ranks[self.node]) if local_rank != self.local_rank]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """How many ranks a node has."""
        return len(self.ranks[0])

    def between(self, transport: Transport) -> Between:
        """What travels between nodes, over a transport between all ranks."""
        return Between(transport, self)


class Between(FrameTransport):
    """Frames and collectives between nodes: its rank i is the rank of node i with the same local rank as this one."""

    def __init__(self, transport: Transport, nodes: Nodes):
        self.rank = nodes.node
        self.world_size = nodes.count
        self._transport = transport
        self._counterparts = [ranks[nodes.local_rank] for ranks in nodes.ranks]

    @property
    def plain(self) -> SubsetCollectives:
        """Uncompressed collectives between nodes, as far as schedules need them."""
        return SubsetCollectives(self._transport.plain, self._counterparts, self.rank)

    @property
    def forecasts(self) -> Forecasts:
        """Those of frames between this rank and its counterparts."""
        return self._transport.forecasts

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[FrameStream]:
        pairs = [(self._counterparts[to], self._counterparts[source]) for to, source in peers]
        return self._transport.streams(pairs, incoming, frame_capacity, counters)


class Places(NamedTuple):
    """Where ranks run. All are in the order of their first ranks.

    Attributes:
        hosts: the ranks of each host.
        machines: the ranks of each machine, which may have several hosts, such as containers; they share its cores.
    """

    hosts: list[list[int]]
    machines: list[list[int]]


def find_places(store: dist.Store, rank: int, world_size: int) -> Places:
    """Where the ranks that share `store` run. All of them must call this.

    Raises PeerError if a rank does not say in time where it runs.
    """
    with peer_errors("finding out which ranks share a host"):
        store.set(f"host {rank}", json.dumps(_this_host()))
        if rank == 0:
            hosts = _hosts(store, world_size)
            of_hosts, of_machines = [json.dumps(host) for host in hosts], [host["machine"] for host in hosts]
            store.set("places", json.dumps([_alike(of_hosts), _alike(of_machines)]))
        return Places(*json.loads(store.get("places")))


def find_nodes(
    setting: int | str, hosts: list[list[int]], store: dist.Store, rank: int, world_size: int
) -> Nodes | None:
    """The nodes that `transport.hierarchy` asks for; None where every rank stands for itself.

    Args:
        hosts: what `find_places` found, in the same store.

    Raises ConfigError on all ranks if the number of ranks per node is impossible.
    """
    if setting == "off":
        return None
    nodes = hosts if setting == "auto" else _consecutive(setting, world_size)
    if setting != "auto" and rank == 0:
        _warn_of_several_machines(nodes, _hosts(store, world_size))
    if len(nodes) == 1 or {len(ranks) for ranks in nodes} != {len(nodes[0])} or len(nodes[0]) == 1:
        return None
    node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
    return Nodes(tuple(map(tuple, nodes)), node, nodes[node].index(rank))


def _this_host() -> dict[str, str]:
    """What tells hosts apart. Containers and network namespaces count as hosts, since a link connects them."""
    name = socket.gethostname()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        machine, network = name, ""
    return {"name": name, "machine": machine, "network": network}


def _hosts(store: dist.Store, world_size: int) -> list[dict[str, str]]:
    """Every rank's host."""
    return [json.loads(store.get(f"host {rank}")) for rank in range(world_size)]


def _alike(of_each: list[str]) -> list[list[int]]:
    """The ranks of which the same is said, in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(of_each):
        ranks.setdefault(said, []).append(rank)
    return list(ranks.values())


def _consecutive(size: int, world_size: int) -> list[list[int]]:
    if world_size % size or world_size == size:
        raise ConfigError(
            f"transport.hierarchy: {size}: {world_size} ranks do not make several nodes of {size} ranks each; "
            "allowed: auto, off, or a divisor of the number of ranks that leaves at least 2 nodes"
        )
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def _warn_of_several_machines(nodes: list[list[int]], hosts: list[dict[str, str]]) -> None:
    for ranks in nodes:
        if len({hosts[rank]["machine"] for rank in ranks}) > 1:
            names = ", ".join(f"{rank} on {hosts[rank]['name']}" for rank in ranks)
            warnings.warn(
                f"transport.hierarchy: {len(ranks)} makes one node of ranks on several machines ({names}): what goes "
                "between them is not compressed. Remedy: start the ranks of a machine one after another, or use auto",
                stacklevel=2,
            )
            return
