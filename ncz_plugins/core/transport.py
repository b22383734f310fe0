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

from ..kernels.format import HEADER, HEADER_BYTES, MAGIC
from . import system
from .errors import FrameError, PeerError, UnsupportedError
from .stats import Counters
from .trace import span, transfer

_FRAME_TAG = 2
# Receives that wait at one time, in bytes for each peer: a sender waits until there is one, and a receiver that is busy
# coding posts no further ones.
_AHEAD_BYTES = 32 << 20

_opened: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


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
        opened = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    _opened.add(opened)
    return opened


def _keep_groups() -> None:
    """In a fork: the end of a process group waits for its threads, which are not there, so it must never come."""
    for group in _opened:
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
        self._rooms: list[Tensor] = []  # memory that receives waited in, for the next call: fresh pages cost time

    def abort(self, error: BaseException) -> None:
        """Drop the connections at once after `error`, so that peers that wait for this rank notice.

        Gloo closes them with the last reference to the group and to all that is under way in it, and the frames that
        an exception went through hold such.
        """
        for group in (self.group, self._control):
            if hasattr(group, "abort"):  # NCCL's does something
                group.abort()
        self.group = self._control = None
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

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
            Stream(self._control, self._rooms, to, source, incoming, frame_capacity, counters) for to, source in peers
        ]

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
    """Frames to one peer and from one peer during one collective, over gloo.

    Neither sending nor receiving ahead blocks, so a schedule may send any number of frames before it receives one.

    Args:
        rooms: memory to take and to give back, of any sizes.
    """

    def __init__(
        self,
        control: dist.ProcessGroup,
        rooms: list[Tensor],
        to: int,
        source: int,
        incoming: int,
        frame_capacity: int,
        counters: Counters,
    ):
        self._control = control
        self._rooms = rooms
        self.to = to
        self.source = source
        self._due = incoming  # frames for which no receive waits yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._frames: deque[tuple[dist.Work, Tensor]] = deque()
        for _ in range(min(max(2, _AHEAD_BYTES // frame_capacity), incoming)):
            room = rooms.pop() if rooms else torch.empty(0, dtype=torch.uint8)
            self._post(room if room.numel() >= frame_capacity else torch.empty(frame_capacity, dtype=torch.uint8))

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
        work, room = self._frames.popleft()
        with span("wait", 0, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        frame = room[: self._size(room)].clone()  # most frames are much smaller than the room they may need
        room[:HEADER_BYTES] = 0  # nobody takes this frame for the next one
        if self._due:
            self._post(room)
        else:
            self._rooms.append(room)
        return frame

    def finish(self) -> None:
        """Wait until all frames have left, so that their memory may go."""
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _post(self, room: Tensor) -> None:
        """Start to receive one more frame."""
        self._due -= 1
        with peer_errors(f"receiving from rank {self.source}"):
            work = self._control.recv([room[: self._capacity]], self.source, _FRAME_TAG)
        work = transfer(work, f"receiving from rank {self.source}", "frame", lambda: self._size(room))
        self._frames.append((work, room))

    def _size(self, room: Tensor) -> int:
        """Bytes of the frame that came. It is from the network, so its header is not believed before it is checked."""
        magic, *_, payload_bytes, _, _ = HEADER.unpack_from(room.numpy())
        size = HEADER_BYTES + payload_bytes
        if magic != MAGIC or size > self._capacity:
            raise FrameError(
                f"rank {self.source} sent a frame of {size} bytes with magic {magic:#x}; at most "
                f"{self._capacity} bytes and {MAGIC:#x} are possible for this call. "
                "All ranks must run the same version of ncz_plugins."
            )
        return size


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
