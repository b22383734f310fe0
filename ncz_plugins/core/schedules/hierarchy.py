"""Plain inside a node, compressed between nodes.

First the ranks of a node add up what they hold, uncompressed: each of them gets the node's sum of one piece of the
tensor. Then the ranks that have the same piece, one on every node, run the compressed collective on it, all pieces at
the same time. At last the ranks of a node give each other the pieces that they lack. So what leaves a node is one
tensor, compressed, however many ranks the node has, and all of them share the coding.

A piece is a run of neighbouring segments of the layout, which is that of a flat call: the same blocks share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.scratch import Scratch
from ..call import Call, Plan, plain_wire_bytes
from ..codec.coded_tensor import Codec
from ..codec.layout import Layout, Window
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..transport.base import Transport
from ..transport.intra_node import exchange
from ..transport.topology import Nodes

_scratch = Scratch()


def in_nodes(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    """The same plan in three stages: inside the nodes, between them, inside them again.

    Args:
        plan: of `call` as it would run flat.
    """
    if call.collective == "broadcast":
        return _broadcast(call, plan, nodes)
    return {
        "all_reduce": _all_reduce,
        "reduce_scatter_tensor": _reduce_scatter,
        "all_gather_into_tensor": _all_gather,
    }[call.collective](call, plan, nodes)


def _all_reduce(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    pieces = _pieces(nodes)
    own = pieces[nodes.local_rank]

    def within_node(transport: Transport, counters: Counters) -> Window:
        def part(local_rank: int) -> Tensor:
            return plan.source[plan.layout.elements(pieces[local_rank])]

        return _node_sum(plan, nodes, transport, part, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _between(call.collective, plan, nodes, transport, codec, own, counters)
        if not codec.bypass:
            _share(nodes, transport, [plan.output[plan.layout.elements(piece)] for piece in pieces], counters)

    plan = replace(plan, addends=nodes.count, addend=nodes.node)
    return replace(plan, measured=own, within_node=within_node, schedule=schedule)


def _reduce_scatter(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    """A piece is made of the parts of the ranks with one local rank, so that each ends with its own part."""
    own = _pieces(nodes)[nodes.local_rank]

    def within_node(transport: Transport, counters: Counters) -> Window:
        by_rank = plan.source.data.view(nodes.count * nodes.size, -1)
        buffer = _buffer("part", plan.source.data, nodes.count * by_rank.shape[1])

        def part(local_rank: int) -> Tensor:
            rows = [by_rank[rank] for rank in _having(nodes, local_rank)]
            return torch.stack(rows, out=buffer.view(nodes.count, -1)).view(-1)

        return _node_sum(plan, nodes, transport, part, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _between(call.collective, plan, nodes, transport, codec, own, counters)

    output = Window(plan.output.data, plan.layout.segment(own[nodes.node]).start)
    order = [rank for local_rank in range(nodes.size) for rank in _having(nodes, local_rank)]
    feedback = plan.feedback and plan.feedback.in_order(order, of=nodes.count * nodes.size)
    plan = replace(plan, feedback=feedback, addends=nodes.count, addend=nodes.node)
    return replace(plan, output=output, measured=own, within_node=within_node, schedule=schedule)


def _all_gather(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    """A piece is made of the parts of the ranks with one local rank, as in `_reduce_scatter`."""
    own = _pieces(nodes)[nodes.local_rank]
    segment = own[nodes.node]

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        elements = plan.layout.elements(own)
        mine = _buffer("part", plan.output.data, elements.stop - elements.start)
        own_codec = replace(codec, tensor=codec.tensor._replace(output=Window(mine, elements.start)))
        _between(call.collective, plan, nodes, transport, own_codec, own, counters)
        if codec.bypass:
            return
        by_rank = plan.output.data.view(nodes.count * nodes.size, -1)
        _put(mine, by_rank, _having(nodes, nodes.local_rank))
        ranks, received = nodes.ranks[nodes.node], _buffer("received", mine, mine.numel())
        for to, source in _turns(nodes):
            exchange(nodes, transport, [(ranks[to], mine)], [(ranks[source], received)], counters)
            _put(received, by_rank, _having(nodes, source))

    source = Window(plan.source.data, plan.layout.segment(segment).start)
    measured = range(segment, segment + 1)
    return replace(plan, source=source, measured=measured, schedule=schedule)


def _broadcast(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    """The root's node deals out the pieces, each goes to all nodes, and there to all ranks. A piece is one segment."""
    block = call.config.quantizer.block_in_effect
    layout = Layout.split(plan.layout.numel, nodes.size, plan.layout.frame_elements, block)
    own = range(nodes.local_rank, nodes.local_rank + 1)
    root = next(node for node, ranks in enumerate(nodes.ranks) if call.root in ranks)
    at_root = nodes.node == root

    def parts(whole: Window) -> list[Tensor]:
        return [whole[layout.segment(i)] for i in range(nodes.size)]

    def within_node(transport: Transport, counters: Counters) -> Window:
        mine = parts(plan.source)[nodes.local_rank]
        if at_root:
            mine = _dealt(nodes, transport, call.root, parts(plan.source), counters)
        return Window(mine, layout.elements(own).start)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _between(call.collective, plan, nodes, transport, codec, own, counters, root=root)
        if not codec.bypass:
            _share(nodes, transport, parts(plan.output), counters)

    measured = own if at_root else range(0)
    return replace(plan, layout=layout, measured=measured, within_node=within_node, schedule=schedule)


def _pieces(nodes: Nodes) -> list[range]:
    """The segments of each local rank's piece: one for each node."""
    return [range(i * nodes.count, (i + 1) * nodes.count) for i in range(nodes.size)]


def _having(nodes: Nodes, local_rank: int) -> list[int]:
    """The ranks with this local rank, one of each node."""
    return [ranks[local_rank] for ranks in nodes.ranks]


def _put(parts: Tensor, by_rank: Tensor, ranks: list[int]) -> None:
    """Copy equal parts to the rows of these ranks. A host waits for a GPU to take a list of them as index."""
    for rank, part in zip(ranks, parts.view(len(ranks), -1)):
        by_rank[rank].copy_(part)


def _between(
    collective: str,
    plan: Plan,
    nodes: Nodes,
    transport: Transport,
    codec: Codec,
    piece: range,
    counters: Counters,
    **root,
) -> None:
    """Run the flat call's schedule on one piece, with the nodes for ranks.

    The output is then there to be shared, unless `codec` has a bypass: the same on all ranks.
    """
    counters.plain_bytes = plain_wire_bytes(collective, codec.source.data.nbytes, nodes.count)
    part = codec.part(piece)
    plan.schedule(nodes.between(transport), part, counters, **root)
    part.finish()


# ---------------------------------------------------------------- inside a node


def _node_sum(
    plan: Plan, nodes: Nodes, transport: Transport, part: Callable[[int], Tensor], counters: Counters
) -> Window:
    """The sum over the ranks of this node of the piece of this rank, in the tensors' own dtype.

    Args:
        part: what this rank adds to the piece of a local rank; may use the same memory each time.
    """
    ranks, elements = nodes.ranks[nodes.node], plan.layout.elements(_pieces(nodes)[nodes.local_rank])
    count = elements.stop - elements.start
    total = _buffer("sum", plan.source.data, count)
    for turn, (to, source) in enumerate(_turns(nodes)):
        received = _buffer("received", total, count) if turn else total
        exchange(nodes, transport, [(ranks[to], part(to))], [(ranks[source], received)], counters)
        with span("local", total.nbytes, counters):
            total += received if turn else part(nodes.local_rank)
    return Window(total, elements.start)


def _turns(nodes: Nodes) -> list[tuple[int, int]]:
    """The local ranks to send to and to receive from in turn, so that each meets every other and all are busy."""
    return [((nodes.local_rank + i) % nodes.size, (nodes.local_rank - i) % nodes.size) for i in range(1, nodes.size)]


def _dealt(nodes: Nodes, transport: Transport, root: int, parts: list[Tensor], counters: Counters) -> Tensor:
    """The part of this rank, of those that the rank `root` of this node holds."""
    ranks, own = nodes.ranks[nodes.node], parts[nodes.local_rank]
    if ranks[nodes.local_rank] == root:
        exchange(nodes, transport, [(rank, part) for rank, part in zip(ranks, parts) if rank != root], [], counters)
        return own
    part = _buffer("part", own, own.numel())
    exchange(nodes, transport, [], [(root, part)], counters)
    return part


def _share(nodes: Nodes, transport: Transport, parts: list[Tensor], counters: Counters) -> None:
    """Fill in the parts that the other ranks of this node have finished."""
    own = parts[nodes.local_rank]
    others = [(rank, part) for rank, part in zip(nodes.ranks[nodes.node], parts) if part is not own]
    exchange(nodes, transport, [(rank, own) for rank, _ in others], others, counters)


def _buffer(name: str, like: Tensor, count: int) -> Tensor:
    """Memory for [count] elements of the kind that `like` has, until the name is asked for again."""
    if like.device.type == "cpu":  # fresh memory would cost as much as the exchange
        return _scratch.of(name, count, like.dtype)
    return like.new_empty(count)
