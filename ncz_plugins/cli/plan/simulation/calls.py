"""Simulation of one collective from beginning to end, compressed or plain, on a fleet of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ....core.bypass import by_size
from ....core.codec.layout import Layout
from ....core.codec.quantize import measured_bytes
from ....core.config import Config
from ....core.errors import UnsupportedError
from ....core.planning import layout_of_parts, layout_of_sum, segments_of_sum
from ....core.runtime.statistics import Counters
from ....core.schedules import direct, halving, ring
from ....core.schedules.choice import schedule_for
from ....core.transport.agreements import WayToAgree, distances, most_with_comparison, way_to_agree
from ....core.transport.mesh import connects_all
from .codec import TimedCodec
from .costs import Costs
from .fleet import Fleet, Link, Racks
from .programs import run_halving
from .sizes import sizes_for
from .transport import TimedTransport

_SCHEDULES = {"ring": ring, "direct": direct, "halving": halving}
_COMPARED_BYTES = 256  # about what ranks send to compare a call


@dataclass(frozen=True)
class Group:
    """Ranks of a collective and their machines.

    Attributes:
        nodes: number of machines.
        ranks_per_node: ranks on each machine.
        link: link of a node.
        costs: costs of a rank.
        cores: cores of a node, for costs of kind cpu; may be a fraction; None: enough.
        late: seconds by which the ranks of each node come late to the call, [nodes]; None: 0.
        racks: racks, whose `ranks` count nodes; None if they make no difference. Uncompressed calls are rings, of which
            one connection leaves each rack: racks don't slow them down.
    """

    nodes: int
    ranks_per_node: int
    link: Link
    costs: Costs
    cores: float | None = None
    late: tuple[float, ...] | None = None
    racks: Racks | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def sharing(self) -> float:
        """Ranks per core, at least 1."""
        if self.costs.kind == "gpu" or self.cores is None:
            return 1.0
        return max(1.0, self.ranks_per_node / self.cores)

    def fleet(self, between_nodes: bool, apart: bool = False) -> Fleet:
        """Fleet of the ranks that exchange frames. All ranks of a node send at once, so each gets a share of its link.

        Args:
            between_nodes: whether one rank of each node takes part, rather than all ranks.
            apart: see `Fleet`.
        """
        each = 1 if between_nodes else self.ranks_per_node
        racks = self.racks and replace(self.racks, ranks=self.racks.ranks * each)
        return self._fleet(self.nodes * each, each, 1 / self.ranks_per_node, apart, racks)

    def fleet_in_line(self) -> Fleet:
        """Fleet of all ranks in a ring: one rank of each node sends to another node, and has the whole link."""
        return self._fleet(self.ranks, self.ranks_per_node, 1.0)

    def _fleet(
        self, ranks: int, of_each_node: int, share: float, apart: bool = False, racks: Racks | None = None
    ) -> Fleet:
        gbps = tuple(share * each for each in np.atleast_1d(self.link.gbps))
        rate = _repeated(gbps, of_each_node) if isinstance(self.link.gbps, tuple) else gbps[0]
        link = replace(self.link, gbps=rate, burst=share * self.link.burst)
        late = None if self.late is None else _repeated(self.late, of_each_node)
        spare = self.costs.kind == "gpu" or self.cores is None or self.cores >= 2 * self.ranks_per_node
        return Fleet(ranks, link, self.costs, self.sharing, spare, late, apart, racks)


def _repeated(of_nodes: tuple[float, ...], times: int) -> tuple[float, ...]:
    """Numbers of nodes, repeated for each of their ranks."""
    return tuple(each for each in of_nodes for _ in range(times))


@dataclass(frozen=True)
class Timed:
    """Times of a call.

    Attributes:
        seconds: seconds until the last rank has its result.
        busy_seconds: seconds in which a rank's cores work.
        wire_bytes: bytes that a rank sends.
        compressed: whether the call is compressed.
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
    """Simulate a call with the settings of `config`; a plain one if these say so.

    Args:
        group: the ranks.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: bytes of the whole tensor.
        config: must be resolved.
        itemsize: bytes of a value.
        ratio, ratio_ranks: see `sizes_for`.

    Raises UnsupportedError for a schedule that the costs are not for.
    """
    if group.ranks == 1 or by_size(nbytes, config, group.costs.kind == "gpu", group.ranks):
        return plain(group, collective, nbytes, itemsize)
    if config.quantizer.bits:
        group = replace(group, costs=group.costs.at_a_fixed_rate)
    # Which ranks exchange frames, and by which schedule.
    hierarchical = group.ranks_per_node > 1 and group.nodes > 1 and config.transport.hierarchy != "off"
    exchanging = group.nodes if hierarchical else group.ranks
    name = "direct" if config.quantizer.bits else config.transport.schedule  # a fixed rate is exchanged like direct
    on_gpu = group.costs.kind == "gpu"
    if name == "auto":
        known = config.transport.link_gbps, on_gpu, group.link.latency
        name = schedule_for(exchanging, nbytes * exchanging // group.ranks, *known)
    apart = name == "halving"
    if apart and on_gpu:
        raise UnsupportedError("transport.schedule: halving is for CPUs; set auto, ring or direct to plan for GPUs")
    fleet = group.fleet(between_nodes=hierarchical, apart=apart)
    sizes = sizes_for(config, ratio, ratio_ranks)
    counters = Counters()
    # How the tensor is cut into segments and frames.
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    tensor = torch.empty(nbytes // itemsize, dtype=dtype, device="meta")
    if collective == "all_reduce":
        shares = group.ranks_per_node if hierarchical else 1
        segments = segments_of_sum(tensor, name, fleet.world_size, shares, config, on_gpu)
        layout = layout_of_sum(tensor, segments, config, on_gpu)
    else:
        segments = group.ranks if hierarchical else fleet.world_size
        layout = layout_of_parts(tensor[: -(-tensor.numel() // segments)], segments, config, on_gpu)
    if hierarchical:  # each rank of a node exchanges an equal piece of the tensor
        layout = layout.for_segments(range(segments // group.ranks_per_node))
        _inside(fleet, group, nbytes)
    # Agree on scales, exchange frames, and pass results on inside nodes.
    fleet.work(1e-6 * group.costs.call_us)
    compares_first = on_gpu or (hierarchical and collective != "all_gather")  # nodes add up before they measure
    counters.wire_bytes += _agree_on_scales(fleet, layout, config, dtype, compares_first)
    schedule = getattr(_SCHEDULES[name], collective)
    if apart:
        run_halving(schedule, fleet, layout, sizes, counters)
    else:
        codec = TimedCodec(fleet, layout, sizes)
        schedule(TimedTransport(fleet), codec, counters)
        codec.finish()
    if hierarchical:
        _inside(fleet, group, nbytes)
    return Timed(float(fleet.end.max()), float(fleet.busy.max()), counters.wire_bytes, True)


def _agree_on_scales(fleet: Fleet, layout: Layout, config: Config, dtype: torch.dtype, compares_first: bool) -> int:
    """Compare calls, measure, and agree on quantization steps. Returns the bytes that each rank sends for this.

    Args:
        compares_first: whether ranks always compare their calls in a separate message before they measure.
    """
    n, nbytes = fleet.world_size, measured_bytes(layout, config.quantizer, dtype)
    together = not compares_first and nbytes <= most_with_comparison(n, connects_all(n))
    if not together:
        _exchange(fleet, _COMPARED_BYTES)
    fleet.work(1e-12 * fleet.costs.measure_ps * layout.numel)
    return int(_exchange(fleet, nbytes + (_COMPARED_BYTES if together else 0)))


def _exchange(fleet: Fleet, nbytes: float) -> float:
    """Element-wise maximum over ranks, as `Connections.start_max` does it. Returns the bytes that a rank sends."""
    n = fleet.world_size
    rounds = distances(n)
    in_parts = 2 * nbytes * (n - 1) / n
    if fleet.costs.kind == "gpu":
        fleet.tell_neighbors(2 * len(rounds), nbytes / 2)
        return in_parts
    match way_to_agree(n, nbytes, connects_all(n)):
        case WayToAgree.TOLD:
            fleet.tell_all(nbytes)
            return (n - 1) * nbytes
        case WayToAgree.IN_PARTS:
            fleet.tell_all(nbytes / n)
            fleet.tell_all(nbytes / n)
        case WayToAgree.SPREAD:
            for distance in rounds:
                fleet.tell_neighbors(1, nbytes, distance)
            return len(rounds) * nbytes
        case WayToAgree.HALVED:
            parts = list(zip(rounds, (*rounds[1:], n)))
            for distance, following in (*reversed(parts), *parts):  # first to the ranks ahead, then back
                fleet.tell_neighbors(1, nbytes * (following - distance) / n, distance)
    return in_parts


def _inside(fleet: Fleet, group: Group, nbytes: float) -> None:
    """Exchange inside a node, in which each rank sends a part to every other rank."""
    size = group.ranks_per_node
    moved = nbytes * (size - 1) / size
    fleet.handle(1e-6 * group.costs.local_us)
    fleet.work(8e-9 * moved / group.costs.local_gbps)


# ------------------------------------------------------------------ plain


def plain(group: Group, collective: str, nbytes: int, itemsize: int = 4, cast: bool = False) -> Timed:
    """Simulate an uncompressed collective: the ring of gloo, or the faster of NCCL's ring and trees.

    Args:
        group: the ranks.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: bytes of the whole tensor.
        itemsize: bytes of a value.
        cast: whether float32 is cast to bfloat16 before, and back after.
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
    """Reduction up a tree of nodes and broadcast down. Data are pipelined in pieces, so bytes count once each way.

    NCCL has two trees, each for half of the data, in which all nodes send and receive.
    """
    fleet, costs = group.fleet_in_line(), group.costs
    fleet.work(before)
    depth = len(distances(max(2, group.nodes)))
    slowest = np.min(fleet.bytes_per_second)
    seconds = 2 * (depth * (1e-6 * costs.plain_message_us + group.link.latency) + nbytes / slowest)
    end = float(fleet.end.max()) + seconds
    return Timed(end, float(fleet.busy.max()) + 1e-6 * costs.plain_message_us * 2, 2 * nbytes, False)
