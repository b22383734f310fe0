"""Hierarchical schedule: plain inside a node, compressed between nodes.

1. The ranks of a node add up their tensors, uncompressed. Each rank gets the node's sum of one share of the tensor.
2. The ranks with the same local rank, one on each node, run a compressed collective on their share. All shares run at
   the same time.
3. The ranks of a node give each other the finished shares.

So a node sends one tensor, compressed, whatever number of ranks it has, and all its ranks do a part of the coding.

A share is a run of neighbouring segments. The layout is that of a call without nodes, so the same blocks share a scale.
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
from ..transport.intra_node import exchange_in_node
from ..transport.topology import Between, Nodes

_scratch = Scratch()


def in_nodes(call: Call, plan: Plan, nodes: Nodes) -> Plan:
    """Turn a plan for all ranks into one in three stages: inside nodes, between nodes, inside nodes.

    Args:
        plan: the plan of `call` without nodes, whose schedule then runs between nodes.
        nodes: which ranks share a node.
    """
    # Functions of a plan must not hold the call, which holds the plan: such a circle would keep the caller's tensors.
    if call.collective == "reduce":
        return _reduce(plan, nodes, call.root)
    if call.collective == "broadcast":
        return _broadcast(plan, nodes, call.root, call.config.quantizer.block_in_effect)
    return {
        "all_reduce": _all_reduce,
        "reduce_scatter_single": _reduce_scatter,
        "all_gather_single": _all_gather,
    }[call.collective](plan, nodes)


def _all_reduce(plan: Plan, nodes: Nodes) -> Plan:
    shares = _shares(plan, nodes)
    own = shares[nodes.local_rank]

    def within_node(transport: Transport, counters: Counters) -> Window:
        def addend(local_rank: int) -> Tensor:
            return plan.source[plan.layout.elements(shares[local_rank])]

        return _sum_in_node(plan, nodes, transport, addend, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("all_reduce", plan, nodes, transport, codec, own, counters)
        if not codec.bypass:
            outputs = [plan.output[plan.layout.elements(share)] for share in shares]
            _gather_in_node(nodes, transport, outputs, counters)

    plan = replace(plan, addends=nodes.count, addend=nodes.node)
    return replace(plan, measured=own, within_node=within_node, schedule=schedule)


def _reduce(plan: Plan, nodes: Nodes, root_rank: int) -> Plan:
    """Reduce: shares of the sum go to the root's node, and there to the root."""
    summed, own = _all_reduce(plan, nodes), _shares(plan, nodes)[nodes.local_rank]
    root = _node_of(root_rank, nodes)
    is_root = nodes.ranks[nodes.node][nodes.local_rank] == root_rank

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        elements = plan.layout.elements(own)
        if not is_root:  # whose own tensor stays as it is
            share = _buffer("share", plan.output.data, elements.stop - elements.start)
            codec = _writing_to(codec, Window(share, elements.start))
        _run_between_nodes("reduce", plan, nodes, transport, codec, own, counters, root=root)
        if codec.bypass or nodes.node != root:
            return
        if is_root:
            shares = zip(nodes.ranks[root], _shares(plan, nodes))
            receives = [(rank, plan.output[plan.layout.elements(each)]) for rank, each in shares if rank != root_rank]
            exchange_in_node(nodes, transport, [], receives, counters)
        else:
            exchange_in_node(nodes, transport, [(root_rank, share)], [], counters)

    return replace(summed, schedule=schedule)


def _reduce_scatter(plan: Plan, nodes: Nodes) -> Plan:
    """Reduce-scatter in which the share of a local rank holds the segments of all ranks with that local rank.

    So each rank ends with its own segment.
    """
    own = _shares(plan, nodes)[nodes.local_rank]

    def within_node(transport: Transport, counters: Counters) -> Window:
        by_rank = plan.source.data.view(nodes.count * nodes.size, -1)
        buffer = _buffer("share", plan.source.data, nodes.count * by_rank.shape[1])

        def addend(local_rank: int) -> Tensor:
            rows = [by_rank[rank] for rank in _with_local_rank(nodes, local_rank)]
            return torch.stack(rows, out=buffer.view(nodes.count, -1)).view(-1)

        return _sum_in_node(plan, nodes, transport, addend, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("reduce_scatter_single", plan, nodes, transport, codec, own, counters)

    output = Window(plan.output.data, plan.layout.segment(own[nodes.node]).start)
    # Error feedback keeps residuals by rank, and the codec now has the segments in another order.
    order = [rank for local_rank in range(nodes.size) for rank in _with_local_rank(nodes, local_rank)]
    feedback = plan.feedback and plan.feedback.in_order(order, of=nodes.count * nodes.size)
    plan = replace(plan, feedback=feedback, addends=nodes.count, addend=nodes.node)
    return replace(plan, output=output, measured=own, within_node=within_node, schedule=schedule)


def _all_gather(plan: Plan, nodes: Nodes) -> Plan:
    """All-gather with the shares of `_reduce_scatter`."""
    own = _shares(plan, nodes)[nodes.local_rank]
    segment = own[nodes.node]

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        elements = plan.layout.elements(own)
        mine = _buffer("share", plan.output.data, elements.stop - elements.start)
        own_codec = _writing_to(codec, Window(mine, elements.start))
        _run_between_nodes("all_gather_single", plan, nodes, transport, own_codec, own, counters)
        if codec.bypass:
            return
        by_rank = plan.output.data.view(nodes.count * nodes.size, -1)

        # Give the finished share to the other ranks of this node, and take theirs.
        _copy_to_rows(mine, by_rank, _with_local_rank(nodes, nodes.local_rank))
        ranks, received = nodes.ranks[nodes.node], _buffer("received", mine, mine.numel())
        for to, source in _partners(nodes):
            exchange_in_node(nodes, transport, [(ranks[to], mine)], [(ranks[source], received)], counters)
            _copy_to_rows(received, by_rank, _with_local_rank(nodes, source))

    source = Window(plan.source.data, plan.layout.segment(segment).start)
    measured = range(segment, segment + 1)
    return replace(plan, source=source, measured=measured, schedule=schedule)


def _broadcast(plan: Plan, nodes: Nodes, root_rank: int, block: int) -> Plan:
    """Broadcast: the root scatters shares inside its node, each share goes to all nodes, and there to all ranks.

    A share is one segment.
    """
    layout = Layout.split(plan.layout.numel, nodes.size, plan.layout.frame_elements, block)
    own = range(nodes.local_rank, nodes.local_rank + 1)
    root = _node_of(root_rank, nodes)
    at_root = nodes.node == root

    def shares_of(whole: Window) -> list[Tensor]:
        return [whole[layout.segment(i)] for i in range(nodes.size)]

    def within_node(transport: Transport, counters: Counters) -> Window:
        mine = shares_of(plan.source)[nodes.local_rank]
        if at_root:
            mine = _scatter_in_node(nodes, transport, root_rank, shares_of(plan.source), counters)
        return Window(mine, layout.elements(own).start)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("broadcast", plan, nodes, transport, codec, own, counters, root=root)
        if not codec.bypass:
            _gather_in_node(nodes, transport, shares_of(plan.output), counters)

    measured = own if at_root else range(0)
    return replace(plan, layout=layout, measured=measured, within_node=within_node, schedule=schedule)


def _shares(plan: Plan, nodes: Nodes) -> list[range]:
    """The segments in the share of each local rank: usually one for each node."""
    segments = len(plan.layout.lengths) // nodes.size
    return [range(i * segments, (i + 1) * segments) for i in range(nodes.size)]


def _with_local_rank(nodes: Nodes, local_rank: int) -> list[int]:
    """The ranks with this local rank, one of each node."""
    return [ranks[local_rank] for ranks in nodes.ranks]


def _node_of(rank: int, nodes: Nodes) -> int:
    return next(node for node, ranks in enumerate(nodes.ranks) if rank in ranks)


def _writing_to(codec: Codec, output: Window) -> Codec:
    """The same codec with another output."""
    return replace(codec, tensor=codec.tensor._replace(output=output))


def _copy_to_rows(values: Tensor, by_rank: Tensor, ranks: list[int]) -> None:
    """Cut `values` into equal parts, one for each of `ranks`, and copy each part to its rank's row of `by_rank`."""
    # Not `by_rank[ranks] = ...`: with a list as index, the host waits for the GPU.
    for rank, row in zip(ranks, values.view(len(ranks), -1)):
        by_rank[rank].copy_(row)


def _run_between_nodes(
    collective: str,
    plan: Plan,
    nodes: Nodes,
    transport: Transport,
    codec: Codec,
    share: range,
    counters: Counters,
    **root,
) -> None:
    """Run the plan's own schedule on one share, between this rank's counterparts on all nodes.

    The share of the output is then complete, unless `codec` has a bypass, which is the same on all ranks.
    """
    counters.plain_bytes = plain_wire_bytes(collective, codec.source.data.nbytes, nodes.count)
    codec = codec.for_segments(share)
    plan.schedule(Between(transport, nodes), codec, counters, **root)
    codec.finish()


# ---------------------------------------------------------------- inside a node


def _sum_in_node(
    plan: Plan, nodes: Nodes, transport: Transport, addend: Callable[[int], Tensor], counters: Counters
) -> Window:
    """Add up this rank's share over the ranks of this node, in the tensors' own dtype.

    Args:
        addend: takes a local rank. Returns this rank's values of that rank's share; may reuse memory in each call.
    """
    ranks, elements = nodes.ranks[nodes.node], plan.layout.elements(_shares(plan, nodes)[nodes.local_rank])
    count = elements.stop - elements.start
    total = _buffer("sum", plan.source.data, count)
    for turn, (to, source) in enumerate(_partners(nodes)):
        received = _buffer("received", total, count) if turn else total
        exchange_in_node(nodes, transport, [(ranks[to], addend(to))], [(ranks[source], received)], counters)
        with span("local", total.nbytes, counters):
            total += received if turn else addend(nodes.local_rank)
    return Window(total, elements.start)


def _partners(nodes: Nodes) -> list[tuple[int, int]]:
    """The pairs of local ranks to send to and to receive from, one after another. All ranks are busy in each turn."""
    return [((nodes.local_rank + i) % nodes.size, (nodes.local_rank - i) % nodes.size) for i in range(1, nodes.size)]


def _scatter_in_node(nodes: Nodes, transport: Transport, root: int, shares: list[Tensor], counters: Counters) -> Tensor:
    """Send each rank of this node its share of the values of rank `root`. Returns this rank's share."""
    ranks, own = nodes.ranks[nodes.node], shares[nodes.local_rank]
    if ranks[nodes.local_rank] == root:
        sends = [(rank, share) for rank, share in zip(ranks, shares) if rank != root]
        exchange_in_node(nodes, transport, sends, [], counters)
        return own
    received = _buffer("share", own, own.numel())
    exchange_in_node(nodes, transport, [], [(root, received)], counters)
    return received


def _gather_in_node(nodes: Nodes, transport: Transport, shares: list[Tensor], counters: Counters) -> None:
    """Send this rank's share to the other ranks of this node, and receive theirs into `shares`."""
    own = shares[nodes.local_rank]
    others = [(rank, share) for rank, share in zip(nodes.ranks[nodes.node], shares) if share is not own]
    exchange_in_node(nodes, transport, [(rank, own) for rank, _ in others], others, counters)


def _buffer(name: str, like: Tensor, count: int) -> Tensor:
    """Memory of the dtype and device of `like`: [count]. On a CPU it is valid until the next call with this name."""
    if like.device.type == "cpu":  # fresh memory would take as long as the exchange
        return _scratch.of(name, count, like.dtype)
    return like.new_empty(count)
