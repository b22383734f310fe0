"""Frames between the ranks of one torch.distributed process group.

Payload sizes vary, and a receive needs the exact size. So every frame's size travels ahead of it as a
message of its own, and the receive is posted as soon as the size is known. Here gloo carries it all,
between CPUs; for GPUs see nccl.py.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from . import system
from .errors import FrameError, PeerError, UnsupportedError
from .stats import Counters
from .trace import span

_SIZE_TAG, _FRAME_TAG = 1, 2
# Sizes are waited for only once this many later ones are due: by then they have arrived, and the
# receive of a frame is still posted well before the frame is needed.
_SIZES_AHEAD = 2


def open_gloo(group: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo process group of our own over the ranks of `group`, which meet at `store`.

    torch.distributed.new_group will not do: it needs every rank of the world, or it derives the
    group's name from how many groups a rank is in, which may differ between ranks.
    """
    if not dist.is_gloo_available():
        raise UnsupportedError(
            "torch was built without gloo, which carries sizes, agreements and compressed CPU tensors"
        )
    with peer_errors("connecting to the other ranks"):
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
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
        group: a gloo process group that nothing else sends through.

    Attributes:
        group: the process group that carries tensors, frames and plain collectives.

    Every method that waits raises PeerError when a peer is dead or silent for longer than the
    group's time-out.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = self._control = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.link_gbps = system.gloo_link_gbps()

    def abort(self) -> None:
        """Drop the connections at once, so that peers that wait for this rank notice."""
        for group in (self.group, self._control):
            if hasattr(group, "abort"):  # else it goes with its last reference
                group.abort()

    def streams(self, peers: list[tuple[int, int]], frame_capacity: int, counters: Counters) -> list[Stream]:
        """All that one collective on this rank sends through: for each (to, source), frames to one rank, from another.

        Frames of one stream arrive in the order sent.
        """
        return [Stream(self._control, to, source, frame_capacity, counters) for to, source in peers]

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """Begin to replace `tensor` by its element-wise maximum over ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        with peer_errors("agreeing with the other ranks"):
            return Agreement(self._control.allreduce([tensor], options), tensor.nbytes, counters)


class Agreement:
    """A MAX all-reduce under way."""

    def __init__(self, work: dist.Work, nbytes: int, counters: Counters):
        self._work = work
        self._nbytes = nbytes
        self._counters = counters

    def wait(self) -> None:
        """Return once the tensor holds the maximum."""
        with span("wait", self._nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            self._work.wait()


class Stream:
    """Frames to one peer and from one peer during one collective.

    Sends never block, so a schedule may send any number of frames before it receives one. To stay
    free of deadlock it says that a frame is expected only once its peer can send that frame without
    a further one from here.

    Args:
        control: the gloo process group that carries the sizes, and here the frames as well.
    """

    def __init__(self, control: dist.ProcessGroup, to: int, source: int, frame_capacity: int, counters: Counters):
        self._control = control
        self.to = to
        self.source = source
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._sizes: deque[tuple[dist.Work, Tensor]] = deque()
        self._frames: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, frame: Tensor) -> None:
        """Start to send a frame (uint8). It must not change until `finish`."""
        self._announce(frame)
        with span("send", frame.nbytes), peer_errors(f"sending to rank {self.to}"):
            self._sending.append((self._control.send([frame], self.to, _FRAME_TAG), frame))

    def expect(self) -> None:
        """One more frame will come."""
        size = torch.empty(1, dtype=torch.int64)
        with peer_errors(f"receiving from rank {self.source}"):
            self._sizes.append((self._control.recv([size], self.source, _SIZE_TAG), size))

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
        return self._arrived()

    def finish(self) -> None:
        """Wait until all frames have left, so that their memory may go."""
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _post(self) -> None:
        """Start to receive the frame whose size comes next."""
        frame = torch.empty(self._incoming_size(), dtype=torch.uint8)
        with peer_errors(f"receiving from rank {self.source}"):
            self._frames.append((self._control.recv([frame], self.source, _FRAME_TAG), frame))

    def _arrived(self) -> Tensor:
        """The oldest frame that is being received, once it is there."""
        work, frame = self._frames.popleft()
        with span("wait", frame.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        return frame

    def _announce(self, frame: Tensor) -> None:
        """Tell the peer how large the frame is that it will get."""
        size = torch.tensor([frame.numel()])
        with peer_errors(f"sending to rank {self.to}"):
            self._sending.append((self._control.send([size], self.to, _SIZE_TAG), size))
        self._counters.wire_bytes += size.nbytes + frame.nbytes

    def _incoming_size(self) -> int:
        """Bytes of the next expected frame."""
        work, size = self._sizes.popleft()
        with span("wait", size.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        # The size comes from the network: check it before memory is taken for it.
        if not 0 < size.item() <= self._capacity:
            raise FrameError(
                f"rank {self.source} announced a frame of {size.item()} bytes; between 1 and {self._capacity} "
                "are possible for this call. All ranks must run the same version of ncz_plugins."
            )
        return size.item()


@contextmanager
def peer_errors(doing: str):
    """Turns what a backend raises into PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{doing} failed: {error}. A peer has died, left, or not answered within the time-out; "
            "look at its log, and raise transport.timeout_seconds if it was only slow."
        ) from error
