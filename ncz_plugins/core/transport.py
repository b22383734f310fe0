"""Frames between the ranks of one torch.distributed process group.

Payload sizes vary, and some backends (NCCL) need the exact size of a receive. So every frame's size
travels ahead of it as a message of its own, and the receive is posted as soon as the size is known.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from . import system
from .errors import FrameError, PeerError, UnsupportedError
from .stats import Counters

_SIZE_TAG, _FRAME_TAG = 1, 2
# Sizes are waited for only once this many later ones are due: by then they have arrived, and the
# receive of a frame is still posted well before the frame is needed.
_SIZES_AHEAD = 2


def open_group(group: dist.ProcessGroup, store: dist.Store, timeout_seconds: float | None) -> dist.ProcessGroup:
    """A process group of our own over the ranks of `group`, which meet at `store`.

    torch.distributed.new_group will not do: it needs every rank of the world, or it derives the
    group's name from how many groups a rank is in, which may differ between ranks.
    """
    if not dist.is_gloo_available():
        raise UnsupportedError("torch was built without gloo, which carries compressed CPU tensors")
    timeout = _timeout_of(group) if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    with peer_errors("connecting to the other ranks"):
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out that the user gave the group, or torch's default where its backend tells none."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout


class Transport:
    """Point-to-point frames and small agreements over a process group of our own.

    Args:
        group: a process group that nothing else sends through.

    Every method that waits raises PeerError when a peer is dead or silent for longer than the
    group's time-out.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.link_gbps = system.gloo_link_gbps()

    def abort(self) -> None:
        """Drop the connections at once, so that peers that wait for this rank notice."""
        if hasattr(self._group, "abort"):  # else it goes with its last reference
            self._group.abort()

    def stream(self, to: int, source: int, frame_capacity: int, counters: Counters) -> Stream:
        """Frames to rank `to` and from rank `source`, each in the order sent."""
        return Stream(self._group, to, source, frame_capacity, counters)

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """Begin to replace `tensor` by its element-wise maximum over ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        with peer_errors("agreeing with the other ranks"):
            return Agreement(self._group.allreduce([tensor], options), counters)


class Agreement:
    """A MAX all-reduce under way."""

    def __init__(self, work: dist.Work, counters: Counters):
        self._work = work
        self._counters = counters

    def wait(self) -> None:
        """Return once the tensor holds the maximum."""
        with peer_errors("agreeing with the other ranks", self._counters):
            self._work.wait()


class Stream:
    """Frames to one peer and from one peer during one collective.

    Sends never block, so a schedule may send any number of frames before it receives one. To stay
    free of deadlock it says that a frame is expected only once its peer can send that frame without
    a further one from here.
    """

    def __init__(self, group: dist.ProcessGroup, to: int, source: int, frame_capacity: int, counters: Counters):
        self._group = group
        self._to = to
        self._source = source
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._sizes: deque[tuple[dist.Work, Tensor]] = deque()
        self._frames: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, frame: Tensor) -> None:
        """Start to send a frame (uint8). It must not change until `finish`."""
        size = torch.tensor([frame.numel()])
        with peer_errors(f"sending to rank {self._to}"):
            self._sending.append((self._group.send([size], self._to, _SIZE_TAG), size))
            self._sending.append((self._group.send([frame], self._to, _FRAME_TAG), frame))
        self._counters.wire_bytes += size.nbytes + frame.nbytes

    def expect(self) -> None:
        """One more frame will come."""
        size = torch.empty(1, dtype=torch.int64)
        with peer_errors(f"receiving from rank {self._source}"):
            self._sizes.append((self._group.recv([size], self._source, _SIZE_TAG), size))

    def exchange(self, frame: Tensor) -> None:
        """Send a frame and expect its counterpart, which the peer is about to send."""
        self.send(frame)
        self.expect()
        if len(self._sizes) > _SIZES_AHEAD:
            self._post()

    def receive(self) -> Tensor:
        """The next expected frame."""
        # One beyond the frame wanted now, so that the link has work while this one is decoded.
        while self._sizes and len(self._frames) < 2:
            self._post()
        work, frame = self._frames.popleft()
        with peer_errors(f"receiving from rank {self._source}", self._counters):
            work.wait()
        return frame

    def finish(self) -> None:
        """Wait until all frames have left, so that their memory may go."""
        with peer_errors(f"sending to rank {self._to}", self._counters):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _post(self) -> None:
        """Start to receive the frame whose size comes next."""
        work, size = self._sizes.popleft()
        with peer_errors(f"receiving from rank {self._source}", self._counters):
            work.wait()
        # The size comes from the network: check it before memory is taken for it.
        if not 0 < size.item() <= self._capacity:
            raise FrameError(
                f"rank {self._source} announced a frame of {size.item()} bytes; between 1 and {self._capacity} "
                "are possible for this call. All ranks must run the same version of ncz_plugins."
            )
        frame = torch.empty(size.item(), dtype=torch.uint8)
        with peer_errors(f"receiving from rank {self._source}"):
            self._frames.append((self._group.recv([frame], self._source, _FRAME_TAG), frame))


class peer_errors:
    """Turns what a backend raises into PeerError, and counts the time as waiting where asked to."""

    def __init__(self, doing: str, waiting: Counters | None = None):
        self._doing = doing
        self._waiting = waiting

    def __enter__(self):
        self._started = time.perf_counter()

    def __exit__(self, kind, error, _):
        if self._waiting is not None:
            self._waiting.wait_seconds += time.perf_counter() - self._started
        if isinstance(error, RuntimeError):
            raise PeerError(
                f"{self._doing} failed: {error}. A peer has died, left, or not answered within the time-out; "
                "look at its log, and raise transport.timeout_seconds if it was only slow."
            ) from error
