"""Tensors from one rank of a node to another: read from its memory where Linux allows it, else sent as messages."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.addresses import host_address
from ..errors import PeerError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from . import process_memory as memory
from .base import Transport, peer_errors
from .topology import Nodes


def with_memory(nodes: Nodes, transport: Transport) -> Nodes:
    """The same nodes, with `processes` if every rank can read its neighbors' memory.

    All ranks must call this. Each holds a random number, which its neighbors try to read. Raises PeerError.
    """
    # Not torch's generator: the next numbers that the program draws must be the same with us and without.
    held = torch.tensor([secrets.randbelow(2**63 - 1)], dtype=torch.int64, device="cpu")
    mine = torch.tensor(
        [os.getpid(), host_address(held, "held", torch.int64, 1), held.item()], dtype=torch.int64, device="cpu"
    )
    received = [(rank, torch.empty_like(mine)) for rank in nodes.neighbors]
    with peer_errors("meeting the ranks of this node"):
        _by_messages(transport, [(rank, mine) for rank in nodes.neighbors], received)
    failed = torch.zeros(1, dtype=torch.float32, device="cpu")
    for _, (process, address, number) in received:
        found = torch.full_like(held, -1)
        try:
            memory.read(process.item(), address.item(), found)
        except OSError:
            pass
        failed += found != number
    transport.start_max(failed, Counters()).wait()  # no rank frees its number before all have tried
    if failed.item():
        return nodes
    return replace(nodes, processes={rank: process.item() for rank, (process, *_) in received})


def exchange(
    nodes: Nodes,
    transport: Transport,
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Tensor]],
    counters: Counters,
) -> None:
    """Send tensors to neighbors and receive tensors from them, of sizes that both sides know. Empty ones are left out.

    Args:
        sends, receives: pairs of a rank and a tensor.
        counters: take the bytes sent and the seconds spent.

    Raises PeerError.
    """
    sends = [(rank, tensor) for rank, tensor in sends if tensor.numel()]
    receives = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
    sent = sum(tensor.nbytes for _, tensor in sends)
    with span("local", sent, counters), peer_errors("exchanging with the ranks of this node"):
        if nodes.processes and all(tensor.device.type == "cpu" for _, tensor in sends + receives):
            _by_memory(nodes.processes, transport, sends, receives)
        else:
            _by_messages(transport, sends, receives)
    counters.local_bytes += sent


def _by_memory(
    processes: dict[int, int], transport: Transport, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
) -> None:
    """Tell the others where the tensors are, read those of the others, and wait until one's own have been read."""
    addresses = [(rank, _address_of(tensor)) for rank, tensor in sends]
    received = [(rank, torch.empty(1, dtype=torch.int64, device="cpu")) for rank, _ in receives]
    _by_messages(transport, addresses, received)
    for (rank, tensor), (_, address) in zip(receives, received):
        try:
            memory.read(processes[rank], address.item(), tensor)
        except OSError as error:
            raise PeerError(f"rank {rank} of this node can't be read any more: {error}; look at its log") from error
    _by_messages(transport, received, addresses)


def _address_of(tensor: Tensor) -> Tensor:
    """What a neighbor is told of memory that it may read: int64, [1]."""
    return torch.tensor([host_address(tensor, "what is sent", tensor.dtype)], dtype=torch.int64, device="cpu")


def _by_messages(transport: Transport, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
    if not sends and not receives:
        return
    for work in transport.plain.exchange(sends, receives):
        work.wait()
