"""Agreements: how ranks find the element-wise maximum of a tensor, and compare what they are about to do.

Up to 16 ranks are all connected with each other, and tell each other in one round or two. Among more, a rank talks with
one other in each of log2(n) rounds, or twice as many. Each agreement is a generator, which waits for nothing before its
first `yield`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PeerError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .base import Tag, Work, peer_errors
from .comparison import RankComparison
from .mesh import Mesh

if TYPE_CHECKING:
    from .connections import Connections

MAX_BYTES_WITH_COMPARISON = 16 << 20  # values that may travel with a comparison, to each other rank
# Limits of the bytes that a rank sends in an agreement, by the way to agree: see `WayToAgree`.
_MAX_TOLD_BYTES = 256 << 10
_MAX_SPREAD_BYTES = 64 << 10

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class WayToAgree(Enum):
    """Ways in which ranks find an element-wise maximum.

    TOLD and IN_PARTS need ranks that are all connected with each other. The others take rounds: see `distances`.
    """

    TOLD = "each rank sends its tensor to all others, in one round"
    IN_PARTS = "each rank finds the maximum of one part and sends it to all others, in two rounds"
    SPREAD = "each rank sends the maximum that it knows to one other, in log2(ranks) rounds"
    HALVED = "each rank sends parts of the maximum that it knows to one other, in 2 log2(ranks) rounds"


def way_to_agree(world_size: int, nbytes: float, meshed: bool) -> WayToAgree:
    """The way in which ranks find a maximum over `nbytes`.

    Args:
        meshed: whether all ranks are connected with each other.
    """
    if meshed:
        told = world_size <= 2 or nbytes <= told_bytes(world_size)
        return WayToAgree.TOLD if told else WayToAgree.IN_PARTS
    return WayToAgree.SPREAD if nbytes * len(distances(world_size)) <= _MAX_SPREAD_BYTES else WayToAgree.HALVED


def told_bytes(world_size: int) -> int:
    """The largest agreement of more than two ranks that takes one round, in bytes."""
    return _MAX_TOLD_BYTES // max(1, world_size - 1)


def most_with_comparison(world_size: int, meshed: bool) -> int:
    """Bytes of an agreement that may travel with a comparison: those that take as many rounds anyway.

    Args:
        meshed: whether all ranks are connected with each other.
    """
    if not meshed:
        return _MAX_SPREAD_BYTES // len(distances(world_size))
    return MAX_BYTES_WITH_COMPARISON if world_size <= 2 else told_bytes(world_size)


@lru_cache
def distances(world_size: int) -> tuple[int, ...]:
    """How far from each other ranks are that talk in each round of an agreement: 1, and each at most twice the last.

    There are log2(world_size) rounds, rounded up. Source: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and
    Allreduce Algorithms" (2024), arXiv:2410.14234.
    """
    found, distance = [], world_size
    while distance > 1:
        distance = -(-distance // 2)
        found.append(distance)
    return tuple(reversed(found))


def neighbors_of(rank: int, world_size: int) -> list[int]:
    """The ranks with which a rank talks in agreements that take rounds."""
    every = [(rank + sign * distance) % world_size for distance in distances(world_size) for sign in (1, -1)]
    return list(dict.fromkeys(every))


# ------------------------------------------------------------------ agreements, each up to `yield` without a wait


def agree(connections: Connections, tensor: Tensor, counters: Counters) -> Iterator[None]:
    """Replace `tensor` by its element-wise maximum over ranks: see `Transport.start_max`."""
    way = {
        WayToAgree.TOLD: _agree_in_one_round,
        WayToAgree.IN_PARTS: _agree_in_parts,
        WayToAgree.SPREAD: _agree_by_spreading,
        WayToAgree.HALVED: _agree_by_halving,
    }[way_to_agree(connections.world_size, tensor.nbytes, connections.mesh is not None)]
    return way(connections, tensor, counters)


def compare(
    connections: Connections, comparison: RankComparison, values: Tensor | None, counters: Counters
) -> Iterator[None]:
    """Compare numbers, and replace `values` by their maximum: see `Transport.start_comparison`. Needs a mesh."""
    values = _NOTHING if values is None else values
    way = _compare_by_spreading if connections.mesh is None else _compare_in_one_round
    return way(connections, comparison, values, counters)


def _agree_in_one_round(connections: Connections, tensor: Tensor, counters: Counters) -> Iterator[None]:
    """See `WayToAgree.TOLD`."""
    n, nbytes = connections.world_size, tensor.nbytes
    exchange = connections.mesh.start([memory_of(tensor)] * n, nbytes, nbytes)
    counters.wire_bytes += nbytes * (n - 1)
    yield
    with span("wait", nbytes, counters):
        received = exchange.wait()
    _take_maximum(tensor, received)


def _compare_in_one_round(
    connections: Connections, comparison: RankComparison, values: Tensor, counters: Counters
) -> Iterator[None]:
    """Compare numbers, and replace `values` by their maximum unless another rank has sent another number of bytes."""
    n = connections.world_size
    exchange = connections.mesh.tell([memory_of(values)] * n, comparison).receive(0, MAX_BYTES_WITH_COMPARISON)
    counters.wire_bytes += (len(comparison.told) + values.nbytes) * (n - 1)
    yield
    with span("wait", values.nbytes, counters):
        received = exchange.wait()
    if all(message.nbytes == values.nbytes for message in received):
        _take_maximum(values, received)


def _agree_in_parts(connections: Connections, tensor: Tensor, counters: Counters) -> Iterator[None]:
    """See `WayToAgree.IN_PARTS`. All ranks must start and wait for their agreements in the same order.

    Each of n ranks sends 2 (n - 1) / n times the bytes of the tensor, where one round takes n - 1 times.
    """
    n, rank, mesh = connections.world_size, connections.rank, connections.mesh
    parts = tensor.view(-1).tensor_split(n)
    own = parts[rank]
    memories = [memory_of(part) for part in parts]
    exchange = mesh.start(memories, own.nbytes, own.nbytes)
    counters.wire_bytes += tensor.nbytes + (n - 2) * own.nbytes  # of other parts, and of its own
    yield
    with span("wait", tensor.nbytes, counters), peer_errors("agreeing with the other ranks"):
        _take_maximum(own, exchange.wait())
        gather(mesh, rank, memories)


def _agree_by_spreading(connections: Connections, tensor: Tensor, counters: Counters) -> Iterator[None]:
    """See `WayToAgree.SPREAD`. All ranks must wait for their agreements in the same order.

    In each round a rank sends its maximum to the rank that is so far ahead, and takes that of the rank that is so far
    behind: the dissemination algorithm of Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization"
    (1988). Some ranks count twice, which does not change a maximum.
    """
    rounds = distances(connections.world_size)
    for number, distance in enumerate(rounds):
        sent, received = tensor.clone(), torch.empty_like(tensor)
        works = _exchange(connections, sent, received, distance, number, counters)
        if number == 0:
            yield
        _await(works, sent.nbytes, counters)
        torch.maximum(tensor, received, out=tensor)


def _compare_by_spreading(
    connections: Connections, comparison: RankComparison, values: Tensor, counters: Counters
) -> Iterator[None]:
    """What `_compare_in_one_round` does, in the rounds of `_agree_by_spreading`."""
    n, rank, mesh, numbers = connections.world_size, connections.rank, connections.neighbors, comparison.tensor
    own, flat = numbers.nbytes, values.view(-1)
    for number, distance in enumerate(distances(n)):
        sent = torch.cat([numbers.view(torch.uint8), flat.view(torch.uint8)])
        coming = mesh.receive((rank - distance) % n, own, own + MAX_BYTES_WITH_COMPARISON)
        messages = [coming, mesh.send((rank + distance) % n, memory_of(sent))]
        counters.wire_bytes += sent.nbytes
        if number == 0:
            yield
        with span("wait", sent.nbytes, counters):
            mesh.finish(messages)
        received = torch.frombuffer(coming.values, dtype=torch.uint8)
        torch.maximum(numbers, received[:own].view(numbers.dtype), out=numbers)
        if flat.numel() and received.numel() == sent.numel():  # else ranks differ, and values don't matter
            torch.maximum(flat, received[own:].view(flat.dtype), out=flat)


def _agree_by_halving(connections: Connections, tensor: Tensor, counters: Counters) -> Iterator[None]:
    """See `WayToAgree.HALVED`. All ranks must wait for their agreements in the same order.

    Each of n ranks sends 2 (n - 1) / n times the bytes of the tensor. A rank counts parts from its own on. In each
    round of the first half, the farthest first, it sends the rank so far ahead the parts of that one and of those
    behind it, and takes the maximum with what comes for its own. What is finished then goes the same way back.
    """
    n, rank = connections.world_size, connections.rank
    length = -(-tensor.numel() // n)
    parts = tensor.new_empty(n, length)
    parts.view(-1)[: tensor.numel()] = tensor.view(-1)
    parts.view(-1)[tensor.numel() :] = tensor.view(-1)[0]  # anything that is no NaN
    parts = parts.roll(-rank, 0)
    rounds = list(zip(distances(n), (*distances(n)[1:], n)))
    for number, (distance, following) in enumerate(reversed(rounds)):
        sent, received = parts[distance:following], parts.new_empty(following - distance, length)
        works = _exchange(connections, sent, received, distance, number, counters)
        if number == 0:
            yield
        _await(works, sent.nbytes, counters)
        kept = parts[: len(received)]
        torch.maximum(kept, received, out=kept)
    for number, (distance, following) in enumerate(rounds, len(rounds)):
        sent, received = parts[: following - distance], parts[distance:following]
        works = _exchange(connections, sent, received, -distance, number, counters)
        _await(works, sent.nbytes, counters)
    tensor.copy_(parts.roll(rank, 0).view(-1)[: tensor.numel()].view_as(tensor))


def _exchange(
    connections: Connections, sent: Tensor, received: Tensor, distance: int, number: int, counters: Counters
) -> tuple[Work, Work]:
    """Begin round `number`: send to the rank `distance` ahead, and receive from the rank `distance` behind."""
    n, rank, tag = connections.world_size, connections.rank, Tag.FIRST_ROUND + number
    with peer_errors("agreeing with the other ranks"):
        works = (
            connections.receive(received, (rank - distance) % n, tag),
            connections.send(sent, (rank + distance) % n, tag),
        )
    counters.wire_bytes += sent.nbytes
    return works


def _await(works: Iterable[Work], nbytes: int, counters: Counters) -> None:
    with span("wait", nbytes, counters), peer_errors("agreeing with the other ranks"):
        for work in works:
            work.wait()


def gather(mesh: Mesh, rank: int, parts: Sequence[memoryview]) -> None:
    """Send this rank's part to all other ranks, and wait for theirs. Raises PeerError.

    Args:
        parts: memory of the part of each rank. Ranks must have compared the sizes before.
    """
    sizes = [part.nbytes for part in parts]
    require_received(mesh.start([parts[rank]] * len(parts), min(sizes), max(sizes), parts).wait())


def require_received(received: Iterable[memoryview]) -> None:
    """Raise PeerError if a message did not go to its memory.

    Args:
        received: what `Exchange.wait` returned.
    """
    if any(message.nbytes for message in received):
        raise PeerError("other ranks sent parts of other sizes: all ranks must run the same version of ncz_plugins")


def _take_maximum(tensor: Tensor, received: Iterable[memoryview]) -> None:
    """Replace `tensor` by the element-wise maximum of itself and the messages."""
    for message in received if tensor.numel() else ():
        torch.maximum(tensor, torch.frombuffer(message, dtype=tensor.dtype).view_as(tensor), out=tensor)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return memoryview(flat.view(torch.uint8).numpy())
