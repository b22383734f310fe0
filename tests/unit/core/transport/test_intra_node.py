"""Tensors from one rank of a node to another: out of its memory, or by messages."""

import os

import pytest
import torch
from ranks import play

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.transport import process_memory as memory
from ncz_plugins.core.transport.intra_node import exchange_in_node, with_memory
from ncz_plugins.core.transport.topology import Nodes

RANKS = ((0, 1), (2, 3))


def nodes_of(rank: int) -> Nodes:
    return Nodes(RANKS, rank // 2, rank % 2)


@pytest.mark.parametrize("by_memory", [True, False])
def test_tensors_are_exchanged_within_nodes_and_counted(by_memory):
    def body(transport):
        nodes, counters = nodes_of(transport.rank), Counters()
        if by_memory:
            nodes = with_memory(nodes, transport)
            assert nodes.processes == dict.fromkeys(nodes.neighbors, os.getpid())
        [neighbor] = nodes.neighbors
        mine, found = torch.full((1000,), float(transport.rank)), torch.zeros(1000)
        nothing = torch.empty(0)
        exchange_in_node(nodes, transport, [(neighbor, mine), (neighbor, nothing)], [(neighbor, found)], counters)
        assert torch.equal(found, torch.full((1000,), float(neighbor)))
        return counters.local_bytes

    assert play(4, body) == [4000] * 4


def test_where_memory_can_not_be_read_pieces_go_by_messages(monkeypatch):
    """As where Linux forbids it."""
    refused = []

    def refuse(*_):
        refused.append(1)
        raise OSError("not permitted")

    monkeypatch.setattr(memory, "read", refuse)
    assert play(4, lambda transport: with_memory(nodes_of(transport.rank), transport).processes) == [None] * 4
    assert refused


def test_memory_that_can_not_be_read_any_more_is_an_error_that_names_the_rank():
    def body(transport):
        nodes = Nodes(((0, 1),), 0, transport.rank, {1 - transport.rank: 2**30})  # a process that does not exist
        peer, tensor = 1 - transport.rank, torch.zeros(10)
        with pytest.raises(PeerError, match=f"rank {peer} of this node can't be read any more"):
            exchange_in_node(nodes, transport, [(peer, tensor)], [(peer, torch.zeros(10))], Counters())

    play(2, body)
