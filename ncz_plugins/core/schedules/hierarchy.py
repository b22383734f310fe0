"""Hierarchical schedule: plain inside a node, compressed between nodes.

1. The ranks of a node add up their tensors, uncompressed. Each speaker of the node gets the sum of one share.
2. The speakers with the same local rank, one on each node, run a compressed collective on their share. All shares run
   at the same time.
3. The speakers of a node give all its ranks the finished shares.

So a node sends one tensor, compressed, whatever number of ranks it has. All ranks of the smallest node are speakers,
and equally many of each other node: all ranks if nodes are even. They do the coding.

A share is a run of neighbouring segments. The layout is that of a call without nodes, so the same blocks share a scale.
Reduce-scatters and all-gathers need even nodes.
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
    shares, own = _shares(plan, nodes), _own_share(plan, nodes)

    def within_node(transport: Transport, counters: Counters) -> Window:
        def addend(local_rank: int) -> Tensor:
            return plan.source[plan.layout.elements(shares[local_rank])]

        return _sum_in_node(plan, nodes, transport, addend, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("all_reduce", plan, nodes, transport, codec, own, counters)
        if not codec.bypass:
            outputs = [plan.output[plan.layout.elements(share)] for share in shares]
            _gather_in_node(nodes, transport, outputs, counters)

    # Nothing is coded, and so nothing lost, on ranks that are no speakers.
    plan = replace(plan, addends=nodes.count, addend=nodes.node, feedback=plan.feedback if nodes.speaks else None)
    return replace(plan, measured=own, within_node=within_node, schedule=schedule)


def _reduce(plan: Plan, nodes: Nodes, root_rank: int) -> Plan:
    """Reduce: shares of the sum go to the root's node, and there to the root."""
    summed, own = _all_reduce(plan, nodes), _own_share(plan, nodes)
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
        elif nodes.speaks:
            exchange_in_node(nodes, transport, [(root_rank, share)], [], counters)

    return replace(summed, schedule=schedule)


def _reduce_scatter(plan: Plan, nodes: Nodes) -> Plan:
    """Reduce-scatter in which the share of a local rank holds the segments of all ranks with that local rank.

    So each rank ends with its own segment.
    """
    own = _own_share(plan, nodes)

    def within_node(transport: Transport, counters: Counters) -> Window:
        by_rank = plan.source.data.view(nodes.count * nodes.speakers, -1)
        buffer = _buffer("share", plan.source.data, nodes.count * by_rank.shape[1])

        def addend(local_rank: int) -> Tensor:
            rows = [by_rank[rank] for rank in _with_local_rank(nodes, local_rank)]
            return torch.stack(rows, out=buffer.view(nodes.count, -1)).view(-1)

        return _sum_in_node(plan, nodes, transport, addend, counters)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("reduce_scatter_single", plan, nodes, transport, codec, own, counters)

    output = Window(plan.output.data, plan.layout.segment(own[nodes.node]).start)
    # Error feedback keeps residuals by rank, and the codec now has the segments in another order.
    order = [rank for local_rank in range(nodes.speakers) for rank in _with_local_rank(nodes, local_rank)]
    feedback = plan.feedback and plan.feedback.in_order(order, of=nodes.count * nodes.speakers)
    plan = replace(plan, feedback=feedback, addends=nodes.count, addend=nodes.node)
    return replace(plan, output=output, measured=own, within_node=within_node, schedule=schedule)


def _all_gather(plan: Plan, nodes: Nodes) -> Plan:
    """All-gather with the shares of `_reduce_scatter`."""
    own = _own_share(plan, nodes)
    segment = own[nodes.node]

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        elements = plan.layout.elements(own)
        mine = _buffer("share", plan.output.data, elements.stop - elements.start)
        own_codec = _writing_to(codec, Window(mine, elements.start))
        _run_between_nodes("all_gather_single", plan, nodes, transport, own_codec, own, counters)
        if codec.bypass:
            return
        by_rank = plan.output.data.view(nodes.count * nodes.speakers, -1)

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
    layout = Layout.split(plan.layout.numel, nodes.speakers, plan.layout.frame_elements, block)
    own = range(nodes.local_rank, nodes.local_rank + 1) if nodes.speaks else range(0)
    root = _node_of(root_rank, nodes)
    at_root = nodes.node == root

    def shares_of(whole: Window) -> list[Tensor]:
        return [whole[layout.segment(i)] for i in range(nodes.speakers)]

    def within_node(transport: Transport, counters: Counters) -> Window:
        shares, received = shares_of(plan.source), None
        if at_root:
            received = _scatter_in_node(nodes, transport, root_rank, shares, counters)
        if not nodes.speaks:
            return plan.source
        mine = shares[nodes.local_rank] if received is None else received
        return Window(mine, layout.elements(own).start)

    def schedule(transport: Transport, codec: Codec, counters: Counters) -> None:
        _run_between_nodes("broadcast", plan, nodes, transport, codec, own, counters, root=root)
        if not codec.bypass:
            _gather_in_node(nodes, transport, shares_of(plan.output), counters)

    measured = own if at_root else range(0)
    return replace(plan, layout=layout, measured=measured, within_node=within_node, schedule=schedule)


def _shares(plan: Plan, nodes: Nodes) -> list[range]:
    """The segments in the share of each speaker, by local rank: usually one for each node."""
    segments = len(plan.layout.lengths) // nodes.speakers
    return [range(i * segments, (i + 1) * segments) for i in range(nodes.speakers)]


def _own_share(plan: Plan, nodes: Nodes) -> range:
    """The segments in the share of this rank; none if it is no speaker."""
    return _shares(plan, nodes)[nodes.local_rank] if nodes.speaks else range(0)


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
    """Run the plan's own schedule on one share, between this rank's counterparts on all nodes, if it is a speaker.

    The share of the output is then complete, unless `codec` has a bypass, which is the same on all ranks.
    """
    if not nodes.speaks:
        counters.plain_bytes = 0
        codec.finish()  # which finds out whether there is a bypass
        return
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
        addend: takes the local rank of a speaker. Returns this rank's values of that one's share; may reuse memory in
            each call.

    Returns the sum; on ranks that are no speakers, the rank's own values.
    """
    ranks, elements = nodes.ranks[nodes.node], plan.layout.elements(_own_share(plan, nodes))
    count, total = elements.stop - elements.start, None
    for to, source in _partners(nodes):
        received = _buffer("sum" if total is None else "received", plan.source.data, count)  # of 0 elements: none comes
        sends = [(ranks[to], addend(to))] if to < nodes.speakers else []
        exchange_in_node(nodes, transport, sends, [(ranks[source], received)], counters)
        if nodes.speaks:
            with span("local", received.nbytes, counters):
                total = received.add_(addend(nodes.local_rank)) if total is None else total.add_(received)
    if not nodes.speaks:
        return plan.source
    return Window(addend(nodes.local_rank) if total is None else total, elements.start)


def _partners(nodes: Nodes) -> list[tuple[int, int]]:
    """The pairs of local ranks to send to and to receive from, one after another. All ranks are busy in each turn."""
    own, size = nodes.local_rank, len(nodes.ranks[nodes.node])
    return [((own + i) % size, (own - i) % size) for i in range(1, size)]


def _scatter_in_node(
    nodes: Nodes, transport: Transport, root: int, shares: list[Tensor], counters: Counters
) -> Tensor | None:
    """Send each speaker of this node its share of the values of rank `root`.

    Returns the share that came; None on the root, which has its share, and on ranks that are no speakers.
    """
    ranks, own = nodes.ranks[nodes.node], nodes.local_rank
    if ranks[own] == root:
        sends = [(rank, share) for rank, share in zip(ranks, shares) if rank != root]
        exchange_in_node(nodes, transport, sends, [], counters)
    if ranks[own] == root or not nodes.speaks:
        return None
    received = _buffer("share", shares[own], shares[own].numel())
    exchange_in_node(nodes, transport, [], [(root, received)], counters)
    return received


def _gather_in_node(nodes: Nodes, transport: Transport, shares: list[Tensor], counters: Counters) -> None:
    """Send this rank's share to the other ranks of this node, and receive into `shares` those of its speakers."""
    ranks, own = nodes.ranks[nodes.node], nodes.local_rank
    sends = [(rank, shares[own]) for rank in nodes.neighbors] if nodes.speaks else []
    receives = [(ranks[i], share) for i, share in enumerate(shares) if i != own]
    exchange_in_node(nodes, transport, sends, receives, counters)


def _buffer(name: str, like: Tensor, count: int) -> Tensor:
    """Memory of the dtype and device of `like`: [count]. On a CPU it is valid until the next call with this name."""
    if like.device.type == "cpu":  # fresh memory would take as long as the exchange
        return _scratch.of(name, count, like.dtype, like.device)
    return like.new_empty(count)
