"""Transfers between ranks of one node: by reading the sender's memory if Linux allows it, else by messages."""

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
    """Find out whether every rank can read the memory of its neighbors. All ranks must call this.

    Returns `nodes` with `processes` set if every rank can, else unchanged. Raises PeerError.
    """
    # Tell the neighbors the address of a random number. Not from torch's generator, which belongs to the program.
    held = torch.tensor([secrets.randbelow(2**63 - 1)], dtype=torch.int64, device="cpu")
    mine = torch.tensor(
        [os.getpid(), host_address(held, "held", torch.int64, 1), held.item()], dtype=torch.int64, device="cpu"
    )
    received = [(rank, torch.empty_like(mine)) for rank in nodes.neighbors]
    with peer_errors("meeting the ranks of this node"):
        _by_messages(transport, [(rank, mine) for rank in nodes.neighbors], received)

    # Try to read the numbers of the neighbors.
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


def exchange_in_node(
    nodes: Nodes,
    transport: Transport,
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Tensor]],
    counters: Counters,
) -> None:
    """Send tensors to neighbors and receive tensors from them. Empty tensors are skipped.

    Args:
        sends, receives: pairs of a rank and a tensor; both sides must know its size.
        counters: receive the bytes sent and the seconds spent.

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
    """Let the receivers read the tensors from this process's memory, and read theirs."""
    # Tell each receiver the address of its tensor.
    addresses = []
    for rank, tensor in sends:
        address = host_address(tensor, "what is sent", tensor.dtype)
        addresses.append((rank, torch.tensor([address], dtype=torch.int64, device="cpu")))
    received = [(rank, torch.empty(1, dtype=torch.int64, device="cpu")) for rank, _ in receives]
    _by_messages(transport, addresses, received)

    for (rank, tensor), (_, address) in zip(receives, received):
        try:
            memory.read(processes[rank], address.item(), tensor)
        except OSError as error:
            raise PeerError(f"rank {rank} of this node can't be read any more: {error}; look at its log") from error

    # Send the addresses back: a sender may change its tensor once all of its receivers have read it.
    _by_messages(transport, received, addresses)


def _by_messages(transport: Transport, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
    if not sends and not receives:
        return
    for work in transport.plain.exchange(sends, receives):
        work.wait()
