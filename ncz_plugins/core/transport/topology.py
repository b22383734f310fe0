"""Topology: which ranks share a node, and which share a machine."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ..errors import ConfigError
from ..runtime.forecast import Forecasts
from ..runtime.statistics import Counters
from .base import FrameStream, FrameTransport, Transport, peer_errors
from .handshake import children_of
from .subset import SubsetCollectives


@dataclass(frozen=True)
class Nodes:
    """Nodes and their ranks, from the view of one rank.

    Attributes:
        ranks: the ranks of each node, [nodes][local ranks]. Nodes may have different numbers of ranks.
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
    def speakers(self) -> int:
        """The number of ranks of each node that speak with other nodes, its first ones: all ranks of the smallest."""
        return min(map(len, self.ranks))

    @property
    def speaks(self) -> bool:
        """Whether this rank is one of the speakers."""
        return self.local_rank < self.speakers

    @property
    def are_even(self) -> bool:
        """Whether all nodes have the same number of ranks, so that all ranks speak."""
        return max(map(len, self.ranks)) == self.speakers


class Between(FrameTransport):
    """Transport between nodes. Its rank i is this rank's counterpart on node i: the rank with the same local rank.

    Args:
        transport: the transport between all ranks.
        nodes: this rank must be one of the speakers.
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
        names: the name of each rank's host; known to rank 0 alone, None on others.
    """

    hosts: list[list[int]]
    machines: list[list[int]]
    names: list[str] | None = None


def find_places(store: dist.Store, rank: int, world_size: int) -> Places:
    """Find out on which hosts and machines the ranks run. All of them must call this.

    Rank 0 hears of all hosts from few ranks, which have heard from others: see `children_of`.

    Args:
        store: the store at which the ranks meet.

    Raises PeerError if a rank does not answer in time.
    """
    with peer_errors("finding out which ranks share a host"):
        found = [_this_host()]
        for child in children_of(rank, world_size):
            for host, count in json.loads(store.get(f"hosts {child}")):
                found += [host] * count
        if rank > 0:
            store.set(f"hosts {rank}", json.dumps([(host, len(list(ranks))) for host, ranks in groupby(found)]))
            return Places(*(_unpacked(groups, world_size) for groups in json.loads(store.get("places"))))
        hosts, machines = (
            _ranks_with_equal(each) for each in ([*map(json.dumps, found)], [host["machine"] for host in found])
        )
        store.set("places", json.dumps([_packed(hosts, world_size), _packed(machines, world_size)]))
        return Places(hosts, machines, [host["name"] for host in found])


def find_nodes(setting: int | str, places: Places, rank: int, world_size: int) -> Nodes | None:
    """The nodes that `transport.hierarchy` asks for; None if a call has no use for nodes.

    Args:
        setting: value of `transport.hierarchy`.
        places: see `find_places`.

    Raises ConfigError on all ranks if the number of ranks per node is impossible.
    """
    if setting == "off":
        return None
    nodes = places.hosts if setting == "auto" else _nodes_of(setting, world_size)
    if setting != "auto" and rank == 0:
        _warn_of_several_machines(nodes, places)
    if len(nodes) == 1 or len(nodes) == world_size:
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


def _packed(groups: list[list[int]], world_size: int) -> int | list[list[int]]:
    """Groups of ranks as JSON: their size, if all are equal and of consecutive ranks, as where there are many."""
    size = len(groups[0])
    return size if groups == _consecutive(size, world_size) else groups


def _unpacked(groups: int | list[list[int]], world_size: int) -> list[list[int]]:
    return _consecutive(groups, world_size) if isinstance(groups, int) else groups


def _ranks_with_equal(values: list[str]) -> list[list[int]]:
    """Group ranks by their values, in the order of first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return list(ranks.values())


def _consecutive(size: int, world_size: int) -> list[list[int]]:
    """Groups of `size` consecutive ranks, of which the last may have fewer."""
    return [list(range(first, min(first + size, world_size))) for first in range(0, world_size, size)]


def _nodes_of(size: int, world_size: int) -> list[list[int]]:
    """Nodes of `size` consecutive ranks. Raises ConfigError."""
    if world_size % size or world_size == size:
        raise ConfigError(
            f"transport.hierarchy: {size}: {world_size} ranks do not make several nodes of {size} ranks each; "
            "allowed: auto, off, or a divisor of the number of ranks that leaves at least 2 nodes"
        )
    return _consecutive(size, world_size)


def _warn_of_several_machines(nodes: list[list[int]], places: Places) -> None:
    """Warn of the first node whose ranks run on several machines."""
    machine_of = {rank: number for number, ranks in enumerate(places.machines) for rank in ranks}
    for ranks in nodes:
        if len({machine_of[rank] for rank in ranks}) > 1:
            names = ", ".join(f"{rank} on {places.names[rank]}" for rank in ranks)
            warnings.warn(
                f"transport.hierarchy: {len(ranks)} makes one node of ranks on several machines ({names}): what goes "
                "between them is not compressed. Remedy: start the ranks of a machine one after another, or use auto",
                stacklevel=2,
            )
            return
