"""Frames between GPUs: NCCL carries them, gloo their sizes.

A send or receive of NCCL holds up the stream that it is on until the peer's counterpart runs. Two ranks that both send
first would wait for ever; so what ranks exchange goes in rounds, in which sends and receives are fused (NCCL's group
calls) and which all ranks complete in the same order. A round is complete once every stream of a collective has a frame
to send. Its sizes travel on the host while the next frames are coded.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FrameError, PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .gloo import Connections, Transport, keep_in_forks, peer_errors, start_exchange

_FRAME_TAG, _SIZE_TAG = 0, 1
_ROUNDS_AHEAD = 1  # rounds whose sizes are still on their way while the next one is coded
# A thread of torch's watches each NCCL group, and ends the process a minute after an error or a time-out. With ours it
# is only to notice: `demand_health` raises an error, and sooner. What it is to do it reads when a group is made.
_WATCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # leave process and group as they are
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # and don't wait for a dump of what went on
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_WATCH_LONGER = timedelta(minutes=1)  # than we wait ourselves
_ABORT_WITHIN = timedelta(seconds=10)


def open_nccl(store: dist.Store, control: Connections, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """A NCCL process group of our own over the ranks of `control`, which meet at `store`."""
    if not dist.is_nccl_available():
        raise UnsupportedError("torch was built without NCCL, which carries compressed CUDA tensors")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout + _WATCH_LONGER
    options.is_high_priority_stream = True
    with peer_errors("connecting to the other GPUs"):
        with _environment(_WATCH):
            group = dist.ProcessGroupNCCL(store, control.rank(), control.size(), options)
        keep_in_forks(group)
        # NCCL connects in the first operation, which all ranks must take part in: not so in a broadcast's first.
        group.allreduce([torch.zeros(1, device=device)]).wait()
    return group


def require_healthy(group: dist.ProcessGroup) -> None:
    """Raise PeerError if NCCL has failed: what a stream waited for may then never come, or not all of it.

    NCCL tells that of a peer that died, but not of one that is silent. torch 2.6 can't be asked; there, the time-out
    shows it.
    """
    if hasattr(group, "get_error") and (error := group.get_error()).value:
        raise PeerError(f"NCCL failed: {error.name}. A peer has died or left; look at its log")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """With these environment variables, and then with those of before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NcclTransport(Transport):
    """As `Transport`, for frames in the memory of one GPU.

    Args:
        control: for agreements and sizes.
        group: a NCCL process group over the same ranks. Nothing else sends through either.
        device: where received frames go.

    Waiting for a frame holds up the current CUDA stream and not the host: see `Gpu.settle` for the time-out.
    """

    def __init__(self, control: Connections, group: dist.ProcessGroup, device: torch.device):
        super().__init__(control)
        self.group = group
        self._device = device

    def abort(self, error: BaseException) -> None:
        self.group._set_default_timeout(_ABORT_WITHIN)  # that of aborting, from here on
        with suppress(RuntimeError):  # what matters is `error`
            self.group.abort()
        super().abort(error)

    def close(self) -> None:
        # With the last reference to a group it is aborted, which peers that still receive would notice.
        shutdown = getattr(self.group, "shutdown", None) or self.group._shutdown  # its name in torch 2.6
        shutdown()

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[_NcclStream]:
        rounds = _Rounds(self.group, len(peers))
        return [
            _NcclStream(self._control, rounds, self._device, to, source, incoming, frame_capacity, counters)
            for to, source in peers
        ]


class _NcclStream:
    """As `transport.Stream`, by NCCL, which needs the exact size of what it receives: sizes travel ahead, over gloo."""

    def __init__(
        self,
        control: Connections,
        rounds: _Rounds,
        device: torch.device,
        to: int,
        source: int,
        incoming: int,
        frame_capacity: int,
        counters: Counters,
    ):
        self._control = control
        self._rounds = rounds
        self._device = device
        self.to = to
        self.source = source
        self._due = incoming  # frames for whose size no receive waits yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._sizes: deque[tuple[dist.Work, Tensor]] = deque()
        self._frames: deque[tuple[dist.Work, Tensor]] = deque()
        for _ in range(_ROUNDS_AHEAD + 2):
            self._expect()

    def send(self, frame: Tensor) -> None:
        self._announce(frame)
        self._rounds.run([(self, frame)], [])

    def exchange(self, frame: Tensor) -> None:
        self._announce(frame)
        self._rounds.add(self, frame)

    def receive(self) -> Tensor:
        while not self._frames and self._rounds.waiting:
            self._rounds.complete()
        if not self._frames:
            self._rounds.run([], [self])
        work, frame = self._frames.popleft()
        with span("wait", frame.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        return frame

    def finish(self) -> None:
        while self._rounds.waiting:
            self._rounds.complete()
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def sent(self, work: dist.Work, frame: Tensor) -> None:
        """A round began to send this frame."""
        self._sending.append((work, frame))

    def receiving(self, work: dist.Work, frame: Tensor) -> None:
        """A round began to receive this frame."""
        self._frames.append((work, frame))

    def next_frame(self) -> Tensor:
        """Memory for the next frame, once its size has come."""
        work, size = self._sizes.popleft()
        self._expect()
        with span("wait", size.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        # The size comes from the network: check it before memory is taken for it.
        if not 0 < size.item() <= self._capacity:
            raise FrameError(
                f"rank {self.source} announced a frame of {size.item()} bytes; between 1 and {self._capacity} "
                "are possible for this call. All ranks must run the same version of ncz_plugins."
            )
        return torch.empty(size.item(), dtype=torch.uint8, device=self._device)

    def _expect(self) -> None:
        """Start to receive the size of one more frame, if one is due."""
        if not self._due:
            return
        self._due -= 1
        size = torch.empty(1, dtype=torch.int64)
        with peer_errors(f"receiving from rank {self.source}"):
            self._sizes.append((self._control.recv([size], self.source, _SIZE_TAG), size))

    def _announce(self, frame: Tensor) -> None:
        """Tell the peer how large the frame is that it will get."""
        size = torch.tensor([frame.numel()])
        with peer_errors(f"sending to rank {self.to}"):
            self._sending.append((self._control.send([size], self.to, _SIZE_TAG), size))
        self._counters.wire_bytes += size.nbytes + frame.nbytes


class _Rounds:
    """What the streams of one collective send and receive together.

    Attributes:
        waiting: rounds that are filled but not yet started, oldest first.
    """

    def __init__(self, group: dist.ProcessGroup, streams: int):
        self._group = group
        self._streams = streams
        self._filling: list[tuple[_NcclStream, Tensor]] = []
        self.waiting: deque[list[tuple[_NcclStream, Tensor]]] = deque()

    def add(self, stream: _NcclStream, frame: Tensor) -> None:
        """A frame to send, whose counterpart is received in the same round."""
        self._filling.append((stream, frame))
        if len(self._filling) == self._streams:
            self.waiting.append(self._filling)
            self._filling = []
        if len(self.waiting) > _ROUNDS_AHEAD:
            self.complete()

    def complete(self) -> None:
        """Start the oldest round that waits."""
        sends = self.waiting.popleft()
        self.run(sends, [stream for stream, _ in sends])

    def run(self, sends: list[tuple[_NcclStream, Tensor]], receives: list[_NcclStream]) -> None:
        """Start sends and receives that belong together."""
        arriving = [(stream, stream.next_frame()) for stream in receives]  # waits for the peers' hosts
        with span("send", sum(frame.nbytes for _, frame in sends)), peer_errors("exchanging frames"):
            works = start_exchange(
                self._group,
                [(stream.to, frame) for stream, frame in sends],
                [(stream.source, frame) for stream, frame in arriving],
                _FRAME_TAG,
            )
        for (stream, frame), work in zip(sends, works):
            stream.sent(work, frame)
        for (stream, frame), work in zip(arriving, works[len(sends) :]):
            stream.receiving(work, frame)
