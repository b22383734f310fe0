"""One collective from beginning to end, compressed or plain, on a fleet of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ....core.bypass import by_size
from ....core.codec.layout import Layout
from ....core.codec.quantize import measured_bytes
from ....core.config import Config
from ....core.planning import adds_up_whole, layout_of_parts, layout_of_sum
from ....core.runtime.statistics import Counters
from ....core.schedules import direct, ring
from ....core.schedules.choice import schedule_for
from ....core.transport.connections import WayToAgree, most_with_comparison, rounds_of, way_to_agree
from ....core.transport.mesh import MOST_RANKS
from .codec import TimedCodec
from .costs import Costs
from .fleet import Fleet, Link
from .sizes import sizes_for
from .transport import TimedTransport

_SCHEDULES = {"ring": ring, "direct": direct}
_COMPARED_BYTES = 256  # about: what ranks compare before a call


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, and what they run on.

    Attributes:
        nodes: machines.
        ranks_per_node: of each of them.
        link: of a node.
        costs: of a rank.
        cores: of a node that its ranks share, for costs of kind cpu, which may be a part of one; None: enough.
        late: see `Fleet`; one for each node.
    """

    nodes: int
    ranks_per_node: int
    link: Link
    costs: Costs
    cores: float | None = None
    late: tuple[float, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def sharing(self) -> float:
        """Ranks for each core of a node."""
        if self.costs.kind == "gpu" or self.cores is None:
            return 1.0
        return max(1.0, self.ranks_per_node / self.cores)

    def fleet(self, between_nodes: bool) -> Fleet:
        """The ranks that send each other frames: one of each node, or all of them.

        All ranks of a node send at the same time, so each has a part of the node's link.
        """
        each = 1 if between_nodes else self.ranks_per_node
        return self._fleet(self.nodes * each, each, 1 / self.ranks_per_node)

    def fleet_in_line(self) -> Fleet:
        """All ranks, where each sends to the next one only: one of each node has the node's link for itself."""
        return self._fleet(self.ranks, self.ranks_per_node, 1.0)

    def _fleet(self, ranks: int, of_each_node: int, share: float) -> Fleet:
        gbps = tuple(share * each for each in np.atleast_1d(self.link.gbps))
        rate = _repeated(gbps, of_each_node) if isinstance(self.link.gbps, tuple) else gbps[0]
        link = replace(self.link, gbps=rate, burst=share * self.link.burst)
        late = None if self.late is None else _repeated(self.late, of_each_node)
        spare = self.costs.kind == "gpu" or self.cores is None or self.cores >= 2 * self.ranks_per_node
        return Fleet(ranks, link, self.costs, self.sharing, spare, late)


def _repeated(of_nodes: tuple[float, ...], times: int) -> tuple[float, ...]:
    """What nodes have, for each of their ranks."""
    return tuple(each for each in of_nodes for _ in range(times))


@dataclass(frozen=True)
class Timed:
    """How a call went.

    Attributes:
        seconds: until the last rank has its result.
        busy_seconds: of work of a rank's cores.
        wire_bytes: that a rank sent.
        compressed: whether it was.
    """

    seconds: float
    busy_seconds: float
    wire_bytes: float
    compressed: bool


# ------------------------------------------------------------------ compressed


def compressed(
    group: Group,
    collective: str,
    nbytes: int,
    config: Config,
    itemsize: int = 4,
    ratio: float | None = None,
    ratio_ranks: int = 1,
) -> Timed:
    """A call with the settings of `config`, plain where these say so.

    Args:
        collective: all_reduce, reduce_scatter or all_gather.
        nbytes: of the whole tensor.
        ratio, ratio_ranks: see `sizes_for`.
    """
    if group.ranks == 1 or by_size(nbytes, config, group.costs.kind == "gpu", group.ranks):
        return plain(group, collective, nbytes, itemsize)
    if config.quantizer.bits:
        group = replace(group, costs=group.costs.at_a_fixed_rate)
    hierarchical = group.ranks_per_node > 1 and group.nodes > 1 and config.transport.hierarchy != "off"
    fleet = group.fleet(between_nodes=hierarchical)
    sizes = sizes_for(config, ratio, ratio_ranks)
    counters = Counters()
    name = "direct" if config.quantizer.bits else config.transport.schedule  # as a fixed rate exchanges its codes
    name = schedule_for(fleet.world_size) if name == "auto" else name
    segments = group.ranks if hierarchical else fleet.world_size
    on_gpu, dtype = group.costs.kind == "gpu", torch.float32 if itemsize == 4 else torch.bfloat16
    tensor = torch.empty(nbytes // itemsize, dtype=dtype, device="meta")
    may_be_whole = collective == "all_reduce" and name == "direct" and not hierarchical and not config.quantizer.bits
    if may_be_whole and adds_up_whole(tensor, segments, config, on_gpu):
        segments = 1
    if collective == "all_reduce":
        layout = layout_of_sum(tensor, segments, config, on_gpu)
    else:
        layout = layout_of_parts(tensor[: -(-tensor.numel() // segments)], segments, config, on_gpu)
    if hierarchical:  # each rank has one of as many pieces as a node has ranks
        layout = layout.for_segments(range(fleet.world_size))
        _inside(fleet, group, nbytes)
    fleet.work(1e-6 * group.costs.call_us)
    compares_first = on_gpu or (hierarchical and collective != "all_gather")  # as nodes add up before they measure
    counters.wire_bytes += _agree_on_scales(fleet, layout, config, dtype, compares_first)
    codec = TimedCodec(fleet, layout, sizes)
    getattr(_SCHEDULES[name], collective)(TimedTransport(fleet), codec, counters)
    codec.finish()
    if hierarchical:
        _inside(fleet, group, nbytes)
    return Timed(float(fleet.end.max()), float(fleet.busy.max()), counters.wire_bytes, True)


def _agree_on_scales(fleet: Fleet, layout: Layout, config: Config, dtype: torch.dtype, compares_first: bool) -> int:
    """Compare calls, measure, and agree on quantization steps. Returns the bytes of it that each rank sends.

    Args:
        compares_first: whether ranks compare their calls in a message of its own, however little they measure.
    """
    n, nbytes = fleet.world_size, measured_bytes(layout, config.quantizer, dtype)
    together = not compares_first and nbytes <= most_with_comparison(n, n <= MOST_RANKS)
    if not together:
        _exchange(fleet, _COMPARED_BYTES)
    fleet.work(1e-12 * fleet.costs.measure_ps * layout.numel)
    return int(_exchange(fleet, nbytes + (_COMPARED_BYTES if together else 0)))


def _exchange(fleet: Fleet, nbytes: float) -> float:
    """The element-wise maximum over ranks, as `Connections.start_max` finds it. Returns the bytes that a rank sends."""
    n = fleet.world_size
    rounds = rounds_of(n)
    in_parts = 2 * nbytes * (n - 1) / n
    if fleet.costs.kind == "gpu":
        fleet.tell_neighbors(2 * rounds, nbytes / 2)
        return in_parts
    match way_to_agree(n, nbytes, n <= MOST_RANKS):
        case WayToAgree.TOLD:
            fleet.tell_all(nbytes)
            return (n - 1) * nbytes
        case WayToAgree.IN_PARTS:
            fleet.tell_all(nbytes / n)
            fleet.tell_all(nbytes / n)
        case WayToAgree.SPREAD:
            for number in range(rounds):
                fleet.tell_neighbors(1, nbytes, 1 << number)
            return rounds * nbytes
        case WayToAgree.RING:
            fleet.tell_neighbors(2 * (n - 1), nbytes / n)
    return in_parts


def _inside(fleet: Fleet, group: Group, nbytes: float) -> None:
    """What the ranks of a node exchange: all of them have parts for all others."""
    size = group.ranks_per_node
    moved = nbytes * (size - 1) / size
    fleet.handle(1e-6 * group.costs.local_us)
    fleet.work(8e-9 * moved / group.costs.local_gbps)


# ------------------------------------------------------------------ plain


def plain(group: Group, collective: str, nbytes: int, itemsize: int = 4, cast: bool = False) -> Timed:
    """The uncompressed collective of the runtime beneath: gloo's ring, or NCCL's ring or trees.

    Args:
        cast: cast float32 to bfloat16 before, and back again after.
    """
    if group.ranks == 1:
        return Timed(0.0, 0.0, 0.0, False)
    sent = nbytes / 2 if cast else nbytes
    before = 1e-6 * group.costs.plain_call_us + (1e-12 * group.costs.cast_ps * nbytes / itemsize if cast else 0.0)
    passes = 2 if collective == "all_reduce" else 1
    of_ring = _plain_ring(group, passes, sent, before)
    if group.costs.kind == "cpu" or collective != "all_reduce":
        return of_ring
    return min(of_ring, _plain_tree(group, sent, before), key=lambda each: each.seconds)


def _plain_ring(group: Group, passes: int, nbytes: float, before: float) -> Timed:
    fleet, costs = group.fleet_in_line(), group.costs
    fleet.work(before)
    part, steps = nbytes / group.ranks, passes * (group.ranks - 1)
    seconds = 1e-12 * (costs.plain_ps + costs.socket_ps) * part
    for _ in range(steps):
        fleet.pass_on(part, 1e-6 * costs.plain_message_us, seconds)
    return Timed(float(fleet.end.max()), float(fleet.busy.max()), steps * part, False)


def _plain_tree(group: Group, nbytes: float, before: float) -> Timed:
    """Up and down a tree of the nodes. What one node sends to the next follows in pieces, so bytes count once each way.

    NCCL has two trees, each for a half of the data, in which every node sends and receives.
    """
    fleet, costs = group.fleet_in_line(), group.costs
    fleet.work(before)
    depth = rounds_of(max(2, group.nodes))
    slowest = np.min(fleet.bytes_per_second)
    seconds = 2 * (depth * (1e-6 * costs.plain_message_us + group.link.latency) + nbytes / slowest)
    end = float(fleet.end.max()) + seconds
    return Timed(end, float(fleet.busy.max()) + 1e-6 * costs.plain_message_us * 2, 2 * nbytes, False)
