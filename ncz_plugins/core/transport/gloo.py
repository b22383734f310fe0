"""Frames between the ranks of one torch.distributed process group.

How large a frame is shows only when it is there: its header tells. Gloo can receive less than there is memory for
(if more comes than fits, it ends the process before any of it is written). So receives are posted ahead, with room for
the largest frame of the call, and a frame travels the moment its sender has it, with no message before it. Here gloo
carries it all, between CPUs; for GPUs see nccl.py.
"""

from __future__ import annotations

import ctypes
import os
import traceback
import weakref
from collections import deque
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.format import HEADER, HEADER_BYTES, MAGIC
from ..errors import FrameError, PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span, transfer
from .link_speed import gloo_link_gbps

_FRAME_TAG, _AGREEMENT_TAG = 2, 3
# Up to so many ranks, each tells all others what is to be agreed on; more send partial maxima round a ring, which costs
# them fewer bytes and many more messages one after another.
_TELL_ALL_RANKS = 16
# Receives that wait at one time, in bytes for each peer: a sender waits until there is one, and a receiver that is busy
# coding posts no further ones.
_AHEAD_BYTES = 32 << 20

_kept_in_forks: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class Connections:
    """Gloo's connections of our own between ranks that meet at `store`: to each peer one for each direction.

    One for both would be slow, as gloo locks it to send: meanwhile the thread that is to read it spins, and on few
    cores it is the sender that it takes the time from. And what a rank has to say about its receives, without which
    nothing is sent, would stand behind the frames that go the same way.

    Has the methods of a process group that messages need.

    Attributes:
        group: a process group, for all else.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        # torch.distributed.new_group will not do: it needs every rank of the world, or it derives the group's name from
        # how many groups a rank is in, which may differ between ranks.
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "torch was built without gloo, which carries sizes, agreements and compressed CPU tensors"
            )
        with peer_errors("connecting to the other ranks"):
            self._upwards, self._downwards = (
                dist.ProcessGroupGloo(dist.PrefixStore(direction, store), rank, world_size, timeout)
                for direction in ("upwards", "downwards")
            )
        keep_in_forks(self._upwards)
        keep_in_forks(self._downwards)
        self._rank = rank
        self.group = self._upwards

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.group.size()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return (self._upwards if to > self._rank else self._downwards).send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return (self._upwards if source < self._rank else self._downwards).recv(tensors, source, tag)


def keep_in_forks(group: dist.ProcessGroup) -> None:
    """In a fork, the end of a process group waits for its threads, which are not there: this one's must never come."""
    _kept_in_forks.add(group)


def _keep_groups() -> None:
    for group in _kept_in_forks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_groups)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out that the user gave the group, or torch's default where its backend tells none."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout


class Transport:
    """Point-to-point frames and small agreements over connections of our own.

    Args:
        control: what nothing else sends through.

    Attributes:
        group: the process group that carries plain collectives, and tensors inside a node.

    Every method that waits raises PeerError when a peer is dead or silent for longer than the
    group's time-out.
    """

    def __init__(self, control: Connections):
        self._control = control
        self.group = control.group
        self.rank = control.rank()
        self.world_size = control.size()
        self.link_gbps = gloo_link_gbps()
        self._buffers: list[Tensor] = []  # memory that receives waited in, for the next call: fresh pages cost time

    def abort(self, error: BaseException) -> None:
        """Drop the connections at once after `error`, so that peers that wait for this rank notice.

        Gloo closes them with the last reference to the group and to all that is under way in it, and the frames that
        an exception went through hold such.
        """
        self.group = self._control = None
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def close(self) -> None:
        """Free what all ranks give up together, when nothing is under way any more."""

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[Stream]:
        """All that one collective on this rank sends through: for each (to, source), frames to one rank, from another.

        Args:
            incoming: frames that each source will send.
            frame_capacity: bytes of the largest possible frame.

        Frames of one stream arrive in the order sent.
        """
        return [
            Stream(self._control, self._buffers, to, source, incoming, frame_capacity, counters) for to, source in peers
        ]

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """Begin to replace `tensor` by its element-wise maximum over ranks."""
        with peer_errors("agreeing with the other ranks"):
            if self.world_size > _TELL_ALL_RANKS:
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                counters.wire_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
                return Agreement(tensor, [], [self._control.group.allreduce([tensor], options)], counters)
            peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
            received = [torch.empty_like(tensor) for _ in peers]
            mine = tensor.clone()  # on its way, it must not change
            works = [self._control.recv([each], peer, _AGREEMENT_TAG) for each, peer in zip(received, peers)]
            works += [self._control.send([mine], peer, _AGREEMENT_TAG) for peer in peers]
            counters.wire_bytes += tensor.nbytes * len(peers)
            return Agreement(tensor, received, works, counters)


class Agreement:
    """An element-wise maximum over ranks, under way.

    Args:
        tensor: where it goes.
        told: what comes from other ranks, to be joined with `tensor`.
        works: what to wait for.
    """

    def __init__(self, tensor: Tensor, received: list[Tensor], works: list[dist.Work], counters: Counters):
        self._tensor = tensor
        self._told = received
        self._works = works
        self._counters = counters

    def wait(self) -> None:
        """Return once the tensor holds the maximum."""
        with span("wait", self._tensor.nbytes, self._counters), peer_errors("agreeing with the other ranks"):
            for work in self._works:
                work.wait()
        for theirs in self._told:
            torch.maximum(self._tensor, theirs, out=self._tensor)


class Stream:
    """Frames to one peer and from one peer during one collective, over gloo.

    Neither sending nor receiving ahead blocks, so a schedule may send any number of frames before it receives one.

    Args:
        rooms: memory to take and to give back, of any sizes.
    """

    def __init__(
        self,
        control: Connections,
        buffers: list[Tensor],
        to: int,
        source: int,
        incoming: int,
        frame_capacity: int,
        counters: Counters,
    ):
        self._control = control
        self._buffers = buffers
        self.to = to
        self.source = source
        self._due = incoming  # frames for which no receive waits yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._frames: deque[tuple[dist.Work, Tensor]] = deque()
        for _ in range(min(max(2, _AHEAD_BYTES // frame_capacity), incoming)):
            buffer = buffers.pop() if buffers else torch.empty(0, dtype=torch.uint8)
            self._post(buffer if buffer.numel() >= frame_capacity else torch.empty(frame_capacity, dtype=torch.uint8))

    def send(self, frame: Tensor) -> None:
        """Start to send a frame (uint8). It must not change until `finish`."""
        with span("send", frame.nbytes), peer_errors(f"sending to rank {self.to}"):
            work = self._control.send([frame], self.to, _FRAME_TAG)
        self._sending.append((transfer(work, f"sending to rank {self.to}", "frame", lambda: frame.nbytes), frame))
        self._counters.wire_bytes += frame.nbytes

    def exchange(self, frame: Tensor) -> None:
        """As `send`, where every rank sends a frame at this point, and receives its counterpart later."""
        self.send(frame)

    def receive(self) -> Tensor:
        """The next frame."""
        work, buffer = self._frames.popleft()
        with span("wait", 0, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        frame = buffer[: self._size(buffer)].clone()  # most frames are much smaller than the room they may need
        buffer[:HEADER_BYTES] = 0  # nobody takes this frame for the next one
        if self._due:
            self._post(buffer)
        else:
            self._buffers.append(buffer)
        return frame

    def finish(self) -> None:
        """Wait until all frames have left, so that their memory may go."""
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _post(self, buffer: Tensor) -> None:
        """Start to receive one more frame."""
        self._due -= 1
        with peer_errors(f"receiving from rank {self.source}"):
            work = self._control.recv([buffer[: self._capacity]], self.source, _FRAME_TAG)
        work = transfer(work, f"receiving from rank {self.source}", "frame", lambda: self._size(buffer))
        self._frames.append((work, buffer))

    def _size(self, buffer: Tensor) -> int:
        """Bytes of the frame that came. It is from the network, so its header is not believed before it is checked."""
        magic, *_, payload_bytes, _, _ = HEADER.unpack_from(buffer.numpy())
        size = HEADER_BYTES + payload_bytes
        if magic != MAGIC or size > self._capacity:
            raise FrameError(
                f"rank {self.source} sent a frame of {size} bytes with magic {magic:#x}; at most "
                f"{self._capacity} bytes and {MAGIC:#x} are possible for this call. "
                "All ranks must run the same version of ncz_plugins."
            )
        return size


def start_exchange(
    group: dist.ProcessGroup, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int
) -> list[dist.Work]:
    """Start to send tensors to ranks, and to receive some. Returns the work of each, in this order.

    For NCCL it is one operation, so that no rank's send waits for its peer's receive, which comes after a send.
    """
    fused = dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL)
    if fused:
        group._start_coalescing()
    works = [group.send([tensor], rank, tag) for rank, tensor in sends]
    works += [group.recv([tensor], rank, tag) for rank, tensor in receives]
    if fused:
        works = [group._end_coalescing()] * len(works)
    return works


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
