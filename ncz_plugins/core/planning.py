"""How a compressed call is carried out: cuts into segments and frames, schedule, addends."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import Tensor

from .call import Call, Plan
from .codec.fixed_rate import equal_rows
from .codec.layout import Layout, Window
from .config import Config
from .group import Group
from .schedules import direct, fixed_rate, halving, ring
from .schedules.exchange import exchange, exchange_at_once
from .schedules.hierarchy import in_nodes
from .training.error_feedback import Feedback
from .training.policy import named
from .training.rotation import Rotation
from .transport.topology import Nodes

_SCHEDULES = {"ring": ring, "direct": direct, "halving": halving, "fixed rate": fixed_rate}
# Below this size the cost of a second frame exceeds what overlapping coding and transfer saves.
_MAX_WHOLE_BYTES = 256 << 10


def frames_of(tensor: Tensor, config: Config, on_gpu: bool = False) -> tuple[int, bool]:
    """Elements of a full frame of `tensor`, and whether coding and transfer should overlap: see `Layout.of`."""
    transport = config.transport
    elements = transport.frame_bytes_in_effect(on_gpu) // tensor.element_size()
    return elements, not on_gpu and not transport.has_fast_link


def layout_of_sum(tensor: Tensor, segments: int, config: Config, on_gpu: bool = False) -> Layout:
    """Layout of a tensor that is summed over ranks, usually with one segment for each rank."""
    elements, overlap = frames_of(tensor, config, on_gpu)
    if config.quantizer.bits is not None:
        return equal_rows(tensor.numel(), segments, elements, overlap)
    return Layout.split(tensor.numel(), segments, elements, config.quantizer.block_in_effect, overlap)


def adds_up_whole(tensor: Tensor, world_size: int, config: Config, on_gpu: bool = False) -> bool:
    """Whether two ranks send each other all of `tensor` as one segment: see schedules/direct.py.

    Codes are the same in any layout. On a GPU each frame takes an operation of NCCL, so there the fewest are best.
    """
    return world_size == 2 and config.quantizer.kind != "lossless" and (on_gpu or tensor.nbytes <= _MAX_WHOLE_BYTES)


def segments_of_sum(
    tensor: Tensor, schedule: str, exchanging: int, shares: int, config: Config, on_gpu: bool = False
) -> int:
    """Segments that a tensor is cut into when all ranks get its sum, or one does. Codes are the same in any.

    Args:
        schedule: "ring", "direct" or "halving".
        exchanging: number of ranks that exchange frames: all of them, or one of each node.
        shares: parts of the tensor that are summed apart: one for each rank of a node that speaks to others, or 1.
    """
    of_share = exchanging
    if config.quantizer.bits is None:  # else the tensor has rows of equal length, one for each rank
        if schedule == "direct" and shares == 1 and adds_up_whole(tensor, exchanging, config, on_gpu):
            of_share = 1
        if schedule == "halving":
            of_share = halving.segments_for(tensor.numel() // shares, exchanging)
        if schedule == "halving" and shares == 1:  # leave out those that would be empty
            of_share = max(1, sum(map(bool, layout_of_sum(tensor, of_share, config, on_gpu).lengths)))
    return shares * of_share


def layout_of_parts(segment: Tensor, world_size: int, config: Config, on_gpu: bool = False) -> Layout:
    """Layout of a tensor that consists of one segment like this for each rank."""
    return Layout.of([segment.numel()] * world_size, *frames_of(segment, config, on_gpu))


def plan(group: Group, call: Call) -> Plan:
    """The plan of a compressed call."""
    if call.pieces is not None:  # which are for single ranks, and gain nothing in nodes
        return _exchange(group, call)
    make = {"broadcast": _broadcast, "all_gather_single": _gather}.get(call.collective, _sum)
    nodes = _nodes_for(group, call)
    made = make(group, call, nodes)
    return made if nodes is None else in_nodes(call, made, nodes)


def _nodes_for(group: Group, call: Call) -> Nodes | None:
    """The nodes between which the frames of a call travel; None: they travel between all ranks."""
    nodes = group.nodes
    # Versions that ranks hold would not pass through nodes, and a matrix would be cut into shares there.
    if nodes is None or call.baseline is not None or call.rotates:
        return None
    # Each rank has a segment of its own. If nodes are uneven, not every rank speaks for its segment.
    is_by_rank = call.collective in ("reduce_scatter_single", "all_gather_single")
    return None if is_by_rank and not nodes.are_even else nodes


def _broadcast(group: Group, call: Call, nodes: Nodes | None) -> Plan:
    layout = Layout.of([call.input.numel()], *frames_of(call.input, call.config, group.on_gpu))
    schedule = partial(_SCHEDULES[_schedule_of(group, call, nodes)].broadcast, root=call.root)
    measured = range(1 if group.rank == call.root else 0)
    return Plan(layout, _flat(call.input), _flat(call.output), measured, schedule, number=call.number)


def _gather(group: Group, call: Call, nodes: Nodes | None) -> Plan:
    layout = layout_of_parts(call.input, group.world_size, call.config, group.on_gpu)
    source = _flat(call.input, layout.segment(group.rank).start)
    measured = range(group.rank, group.rank + 1)
    schedule = _SCHEDULES[_schedule_of(group, call, nodes)].all_gather
    return Plan(layout, source, _flat(call.output), measured, schedule, number=call.number)


def _exchange(group: Group, call: Call) -> Plan:
    # Where there are several pieces for others, each is coded while those before it travel.
    elements, overlap = frames_of(call.input, call.config, group.on_gpu)
    cut = group.rank, elements, overlap and group.world_size == 2
    sent, received = (
        _layout_of_pieces(lengths, *cut) for lengths in (call.pieces.elements_sent(), call.pieces.elements_received())
    )
    schedule = exchange_at_once if group.on_gpu else exchange
    if call.config.quantizer.bits is not None:
        schedule = fixed_rate.exchange
    # Groups that make equally many calls, such as the two directions between two ranks, draw other random numbers.
    number = call.number + zlib.crc32(repr(group.ranks).encode())
    return Plan(sent, _flat(call.input), _flat(call.output), range(0), schedule, received, number)


def _layout_of_pieces(lengths: list[int], rank: int, frame_elements: int, overlap: bool) -> Layout:
    """Layout with the piece for each rank, or of each. Both ends cut a piece alike, whatever other pieces they have.

    A piece that is longer than a full frame is cut into full frames, and any other is one. With `overlap` there is but
    one piece, besides that which `rank` keeps.
    """
    others = Layout.of(lengths[:rank] + lengths[rank + 1 :], frame_elements, overlap)
    return replace(others, lengths=tuple(lengths))


def _sum(group: Group, call: Call, nodes: Nodes | None) -> Plan:
    """Of an all_reduce, a reduce or a reduce_scatter_single."""
    n, config = group.world_size, call.config
    layout, start, schedule = _way_of_sum(group, call, nodes)
    feedback = None
    if config.quantizer.feeds_back:
        feedback = Feedback(group.training.residuals, group.own_names(call.fed_back_parts))
    rotation = None
    if config.quantizer.rotates:
        rotation = Rotation(group.training.rotations, group.own_names(call.parts), group.rank, group.ranks)
    # The guard compares what all ranks have. Of a reduce one rank has the result.
    verifies = call.collective != "reduce" and group.state.guard.picks(group.training.step)
    source = _flat(call.input)
    return Plan(
        layout,
        source,
        source if call.output is call.input else _flat(call.output, start),
        range(len(layout.lengths)),
        schedule,
        number=call.number,
        addends=n,
        addend=group.rank,
        divisor=(n if call.op == dist.ReduceOp.AVG else 1) / call.scale,
        feedback=feedback,
        rotation=rotation,
        verify_as=(named(call.parts) or "") if verifies else None,
    )


def _way_of_sum(group: Group, call: Call, nodes: Nodes | None) -> tuple[Layout, int, Callable]:
    """The layout of a sum, the element of it that the output begins with, and the schedule."""
    config, name = call.config, _schedule_of(group, call, nodes)
    schedule = _SCHEDULES[name]
    if call.collective == "reduce_scatter_single":
        layout = layout_of_parts(call.output, group.world_size, config, group.on_gpu)
        return layout, layout.segment(group.rank).start, schedule.reduce_scatter
    exchanging, shares = (nodes.count, nodes.speakers) if nodes else (group.world_size, 1)
    segments = segments_of_sum(call.input, name, exchanging, shares, config, group.on_gpu)
    layout = layout_of_sum(call.input, segments, config, group.on_gpu)
    move = partial(schedule.reduce, root=call.root) if call.collective == "reduce" else schedule.all_reduce
    return layout, 0, move


def _schedule_of(group: Group, call: Call, nodes: Nodes | None) -> str:
    """The schedule that moves the frames of a call, one of _SCHEDULES."""
    if call.config.quantizer.bits is not None:
        return "fixed rate"
    if call.baseline is not None and group.nodes is not None:
        return "ring"  # in which each part enters a node once
    return group.schedule_for(call.larger.nbytes, nodes)


def _flat(tensor: Tensor, start: int = 0) -> Window:
    """A tensor in one dimension, of which autograd knows nothing, as the elements of a layout from `start` on."""
    # Views are detached, too: a view of a parameter that was made under no_grad may not be written to.
    tensor = tensor.detach()
    return Window(tensor if tensor.dim() == 1 else tensor.view(-1), start)  # a view takes 2 us
