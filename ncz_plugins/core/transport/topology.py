"""Topology: which ranks share a node, and which share a machine."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence
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
    """Nodes and their ranks, from the view of one rank.

    Attributes:
        ranks: the ranks of each node, [nodes][local ranks]. All nodes have the same number of ranks.
        node: the node of this rank.
        local_rank: the index of this rank among the ranks of its node.
        processes: rank -> process id, for each neighbor, if this rank can read their memory; else None.
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
        """The number of nodes."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks of a node."""
        return len(self.ranks[0])


class Between(FrameTransport):
    """Transport between nodes. Its rank i is this rank's counterpart on node i: the rank with the same local rank.

    Args:
        transport: the transport between all ranks.
    """

    def __init__(self, transport: Transport, nodes: Nodes):
        self.rank = nodes.node
        self.world_size = nodes.count
        self._transport = transport
        self._counterparts = [ranks[nodes.local_rank] for ranks in nodes.ranks]

    @property
    def plain(self) -> SubsetCollectives:
        """The uncompressed collectives between nodes that schedules need."""
        return SubsetCollectives(self._transport.plain, self._counterparts, self.rank)

    @property
    def forecasts(self) -> Forecasts:
        """Forecasts for frames between this rank and its counterparts."""
        return self._transport.forecasts

    def streams(
        self, peers: list[tuple[int, int]], incoming: Sequence[int], frame_capacity: int, counters: Counters
    ) -> list[FrameStream]:
        pairs = [(self._counterparts[to], self._counterparts[source]) for to, source in peers]
        return self._transport.streams(pairs, incoming, frame_capacity, counters)


class Places(NamedTuple):
    """Hosts and machines of all ranks, each list in the order of first ranks.

    Attributes:
        hosts: the ranks of each host.
        machines: the ranks of each machine. Containers on one machine are several hosts, which share its cores.
    """

    hosts: list[list[int]]
    machines: list[list[int]]


def find_places(store: dist.Store, rank: int, world_size: int) -> Places:
    """Find out on which hosts and machines the ranks run. All of them must call this.

    Args:
        store: the store at which the ranks meet.

    Raises PeerError if a rank does not answer in time.
    """
    with peer_errors("finding out which ranks share a host"):
        store.set(f"host {rank}", json.dumps(_this_host()))
        if rank == 0:
            hosts = _hosts(store, world_size)
            host_of, machine_of = [json.dumps(host) for host in hosts], [host["machine"] for host in hosts]
            store.set("places", json.dumps([_ranks_with_equal(host_of), _ranks_with_equal(machine_of)]))
        return Places(*json.loads(store.get("places")))


def find_nodes(
    setting: int | str, hosts: list[list[int]], store: dist.Store, rank: int, world_size: int
) -> Nodes | None:
    """The nodes that `transport.hierarchy` asks for; None if a call has no use for nodes.

    Args:
        setting: value of `transport.hierarchy`.
        hosts: `Places.hosts`, found with the same store.

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
    """Names that are unique to this host. A container or network namespace is a host, as others reach it by a link."""
    name = socket.gethostname()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        machine, network = name, ""
    return {"name": name, "machine": machine, "network": network}


def _hosts(store: dist.Store, world_size: int) -> list[dict[str, str]]:
    """The host of each rank: see `_this_host`."""
    return [json.loads(store.get(f"host {rank}")) for rank in range(world_size)]


def _ranks_with_equal(values: list[str]) -> list[list[int]]:
    """Group ranks by their values, in the order of first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return list(ranks.values())


def _consecutive(size: int, world_size: int) -> list[list[int]]:
    """Nodes of `size` consecutive ranks. Raises ConfigError."""
    if world_size % size or world_size == size:
        raise ConfigError(
            f"transport.hierarchy: {size}: {world_size} ranks do not make several nodes of {size} ranks each; "
            "allowed: auto, off, or a divisor of the number of ranks that leaves at least 2 nodes"
        )
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def _warn_of_several_machines(nodes: list[list[int]], hosts: list[dict[str, str]]) -> None:
    """Warn of the first node whose ranks run on several machines."""
    for ranks in nodes:
        if len({hosts[rank]["machine"] for rank in ranks}) > 1:
            names = ", ".join(f"{rank} on {hosts[rank]['name']}" for rank in ranks)
            warnings.warn(
                f"transport.hierarchy: {len(ranks)} makes one node of ranks on several machines ({names}): what goes "
                "between them is not compressed. Remedy: start the ranks of a machine one after another, or use auto",
                stacklevel=2,
            )
            return
