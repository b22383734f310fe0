"""Two ways for frames to travel between Horovod's ranks.

`HorovodTransport` goes over Horovod's own runtime, so that process sets, elastic training and the timeline keep
working. Horovod has no point-to-point messages. The direct schedule needs none: its frames to all peers are collected
until it waits for one from a peer, and then travel together in one `alltoall` with uneven splits.

`open_ring` opens the core's own connections beside Horovod, for the ring schedule.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from datetime import timedelta
from functools import partial

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from ..core.errors import FrameError
from ..core.runtime.statistics import Counters
from ..core.transport.gloo import Connections, Transport
from ..core.transport.handshake import open_store

_RING_TIMEOUT = timedelta(minutes=5)
_PATIENCE = 2e-4  # seconds between looks at an operation, which takes a millisecond or more


def result_of(handle):
    """What `hvd.synchronize` returns, without the core that it keeps busy meanwhile by calling sched_yield in a loop.

    Where ranks share cores, Linux lets a thread that has yielded so often wait for seconds once it has work to do.
    """
    while not hvd.poll(handle):
        time.sleep(_PATIENCE)
    return hvd.synchronize(handle)


class HorovodTransport:
    """One call's messages over one process set.

    Args:
        name: the call's own; Horovod matches operations over ranks by name.
    """

    link_gbps = None  # Horovod does not tell what it goes over

    def __init__(self, process_set, name: str):
        self._process_set = process_set
        self._name = name
        self._operations = 0
        self.rank = process_set.rank()
        self.world_size = process_set.size()
        self._outgoing: dict[int, list[Tensor]] = {peer: [] for peer in range(self.world_size)}
        self._incoming: dict[int, deque[Tensor]] = {peer: deque() for peer in range(self.world_size)}

    def start_max(self, tensor: Tensor, counters: Counters) -> _Agreement:
        """Begin to replace `tensor` by its element-wise maximum over ranks."""
        counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        handle = hvd.allreduce_async_(tensor, op=hvd.Max, name=self._next_name(), process_set=self._process_set)
        return _Agreement(handle, counters)

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[_Stream]:
        """Frames to and from the same peer each, as the direct schedule has it."""
        return [_Stream(self, peer, frame_capacity, counters) for peer, _ in peers]

    def _next_name(self) -> str:
        self._operations += 1
        return f"{self._name}.{self._operations}"

    def _exchange(self, frame_capacity: int, counters: Counters) -> None:
        """Send all collected frames and receive those of all peers. Every rank of the schedule gets here alike."""
        pieces = [_packed(self._outgoing[peer]) for peer in range(self.world_size)]
        splits = torch.tensor([piece.numel() for piece in pieces], dtype=torch.int32)
        own_and_peers = torch.cat(pieces)
        self._outgoing = {peer: [] for peer in range(self.world_size)}
        counters.wire_bytes += own_and_peers.nbytes - pieces[self.rank].nbytes
        started = time.perf_counter()
        handle = hvd.alltoall_async(own_and_peers, splits, name=self._next_name(), process_set=self._process_set)
        received, sizes = result_of(handle)
        counters.wait_seconds += time.perf_counter() - started
        for peer, piece in enumerate(received.split(sizes.tolist())):
            if peer != self.rank:
                self._incoming[peer].extend(_unpacked(piece, peer, frame_capacity))


class _Agreement:
    def __init__(self, handle, counters: Counters):
        self._handle = handle
        self._counters = counters

    def wait(self) -> None:
        started = time.perf_counter()
        result_of(self._handle)
        self._counters.wait_seconds += time.perf_counter() - started


class _Stream:
    """What the direct schedule sees of one peer."""

    def __init__(self, transport: HorovodTransport, peer: int, frame_capacity: int, counters: Counters):
        self._transport = transport
        self._peer = peer
        self._capacity = frame_capacity
        self._counters = counters

    def exchange(self, frame: Tensor) -> None:
        self._transport._outgoing[self._peer].append(frame)

    def receive(self) -> Tensor:
        incoming = self._transport._incoming[self._peer]
        if not incoming:
            self._transport._exchange(self._capacity, self._counters)
        return incoming.popleft()

    def finish(self) -> None:
        """Nothing to wait for: the all-reduce ends with a receive from every peer."""


def _packed(frames: list[Tensor]) -> Tensor:
    """The number of frames and their sizes as 64-bit numbers, then the frames."""
    sizes = np.array([len(frames), *(frame.numel() for frame in frames)], dtype="<i8")
    return torch.cat([torch.from_numpy(sizes.view(np.uint8)), *frames]) if frames else torch.empty(0, dtype=torch.uint8)


def _unpacked(piece: Tensor, peer: int, frame_capacity: int) -> list[Tensor]:
    """The frames of `_packed`; nothing in it is believed before it is checked."""
    words = piece[: piece.numel() // 8 * 8].numpy().view("<i8")
    count = int(words[0]) if words.size else -1
    if 0 < count < words.size:
        sizes = words[1 : 1 + count]
        if sizes.min() > 0 and sizes.max() <= frame_capacity and 8 * (1 + count) + int(sizes.sum()) == piece.numel():
            return list(piece[8 * (1 + count) :].split(sizes.tolist()))
    raise FrameError(
        f"rank {peer} sent {piece.numel()} bytes that are not frames of this call. "
        "All ranks must run the same version of ncz_plugins."
    )


def open_ring(process_set, timeout_seconds: float | None) -> Transport:
    """Connect the ranks of a process set by gloo; all of them must call this. They meet through Horovod."""
    rank, world_size = process_set.rank(), process_set.size()
    timeout = _RING_TIMEOUT if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    first = process_set.ranks[0] if process_set.ranks else 0
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()  # horovodrun sets it
    broadcast = partial(hvd.broadcast, root_rank=first, name="ncz.ring", process_set=process_set)
    store = open_store(rank, world_size, timeout, host, broadcast)
    return Transport(Connections(store, rank, world_size, timeout))
