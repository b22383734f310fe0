"""Transport for tensors in host memory.

Frames go over a mesh of sockets, see mesh_stream.py. If there is none, as gloo is to encrypt, they go through gloo, as
follows. The receiver does not know the size of a frame beforehand. Gloo can receive less than there is memory for, but
ends the process if more comes than fits. So receives are posted ahead, each with a buffer for the largest frame of the
call. A frame leaves as soon as its sender has it, without a message before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...kernels.format import HEADER_BYTES
from ..runtime.statistics import Counters
from ..runtime.trace import record, span
from .agreements import most_with_comparison
from .base import FrameStream, Tag, Transport, Work, frames_of, peer_errors
from .comparison import RankComparison
from .connections import Connections
from .mesh_stream import MeshStream
from .plain import TorchCollectives
from .small import Exchanges, SmallCollectives, SmallMessages
from .subset import SubsetCollectives

# Bytes of the receives that are posted ahead for each peer. A frame leaves once a receive is posted for it, and a rank
# posts none while it is coding.
_POSTED_BYTES = 32 << 20


class GlooTransport(Transport):
    """Transport for tensors in host memory.

    Args:
        connections: connections between the ranks, closed with this transport. Only NcclTransport may send through
            them as well, with tags of its own.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self.rank = connections.rank
        self.world_size = connections.world_size
        if connections.frames is not None:
            self.most_with_comparison = most_with_comparison(self.world_size, connections.mesh is not None)
        if connections.has_no_groups:
            self.plain = SubsetCollectives(_HostCollectives(connections), range(self.world_size), self.rank)
            self.small = SmallMessages(connections)
        else:
            self.plain = _HostCollectives(connections)
            self.small = SmallCollectives(connections)
        self.exchanges = None if connections.mesh is None else Exchanges(connections)
        self._buffers: list[Tensor] = []  # buffers of receives, kept for the next call: fresh memory takes time

    def connect(self, peers: Iterable[int]) -> None:
        if self._connections.frames is not None:
            self._connections.frames.connect(peers)

    def streams(
        self, peers: list[tuple[int, int]], incoming: Sequence[int], frame_capacity: int, counters: Counters
    ) -> list[FrameStream]:
        mesh = self._connections.frames
        if mesh is not None:
            self.connect(rank for pair in peers for rank in pair)
            return [MeshStream(mesh, to, source, incoming, frame_capacity, counters) for to, source in peers]
        return [
            GlooStream(self._connections, self._buffers, to, source, incoming, frame_capacity, counters)
            for to, source in peers
        ]

    @property
    def channels(self) -> int:
        """TCP connections with each rank that frames take in turns; at first all.

        All ranks must set the same number, while no frames are under way.
        """
        mesh = self._connections.frames
        return 1 if mesh is None else mesh.channels

    @channels.setter
    def channels(self, count: int) -> None:
        if self._connections.frames is not None:
            self._connections.frames.channels = count

    def close_unused(self) -> None:
        """Close the connections beyond `channels`. All ranks must call this, after they have set `channels`."""
        if self._connections.frames is not None:
            self._connections.frames.close_unused()

    def start_max(self, tensor: Tensor, counters: Counters) -> Work:
        return self._connections.start_max(tensor, counters)

    def start_comparison(self, comparison: RankComparison, counters: Counters, values: Tensor | None = None) -> Work:
        return self._connections.start_comparison(comparison, counters, values)

    def has_left(self, rank: int) -> bool:
        """See `Mesh.has_left`. Without a mesh nobody knows."""
        mesh = self._connections.mesh or self._connections.neighbors
        return mesh is not None and mesh.has_left(rank)

    def close(self) -> None:
        self._connections.close()

    def abort(self, error: BaseException) -> None:
        self._connections.close(error)


class _HostCollectives(TorchCollectives):
    """Uncompressed collectives by gloo, and messages over a mesh if there is one."""

    def __init__(self, connections: Connections):
        super().__init__(lambda: connections.group, connections.track)
        self._connections = connections

    def exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int = Tag.PLAIN
    ) -> list[Work]:
        connections = self._connections
        connections.connect(rank for rank, _ in [*sends, *receives])
        works = [connections.send(tensor, to, tag) for to, tensor in sends]
        return works + [connections.receive(tensor, source, tag) for source, tensor in receives]


class GlooStream(FrameStream):
    """Stream of frames over gloo, for groups without a mesh.

    Args:
        buffers: memory for receives, to take from and to give back to: uint8, of any sizes.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(
        self,
        connections: Connections,
        buffers: list[Tensor],
        to: int,
        source: int,
        incoming: Sequence[int],
        frame_capacity: int,
        counters: Counters,
    ):
        self._connections = connections
        self._buffers = buffers
        self.to = to
        self.source = source
        self._due = deque(incoming)  # messages for which no receive is posted yet
        self._capacity = frame_capacity * max(incoming, default=1)
        self._counters = counters
        self._sending: list[tuple[Work, Tensor, float]] = []  # with the time when it began
        self._messages: deque[tuple[int, Work, Tensor, float]] = deque()
        self._frames: deque[Tensor] = deque()  # that have come in a message with one that was asked for
        self._received_at = 0.0  # when the message before was there
        for _ in range(min(max(2, _POSTED_BYTES // self._capacity), len(incoming))):
            buffer = buffers.pop() if buffers else None
            if buffer is None or buffer.numel() < self._capacity:
                buffer = torch.empty(self._capacity, dtype=torch.uint8, device="cpu")
            self._post(buffer)

    def send(self, *frames: Tensor) -> None:
        message = frames[0] if len(frames) == 1 else torch.cat(frames)
        with span("send", message.nbytes), peer_errors(f"sending to rank {self.to}"):
            work = self._connections.send(message, self.to, Tag.FRAME)
        self._sending.append((work, message, time.perf_counter()))
        self._counters.wire_bytes += message.nbytes

    def receive(self) -> Tensor:
        if not self._frames:
            self._frames += self._next_message()
        return self._frames.popleft()

    def _next_message(self) -> list[Tensor]:
        """Wait for a message. Returns its frames. Raises FrameError if it has others."""
        count, work, buffer, posted = self._messages.popleft()
        with span("wait", 0, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        # Copied, as most frames are much smaller than the buffer.
        received = frames_of(buffer.numpy(), count, self.source)
        frames = [torch.from_numpy(frame.copy()) for frame in received]
        before, self._received_at = self._received_at, time.perf_counter()
        nbytes = sum(frame.nbytes for frame in frames)
        record(f"receiving from rank {self.source}", "frame", max(posted, before), self._received_at, nbytes)
        for frame in received:
            frame[:HEADER_BYTES] = 0  # so that no frame of this message is taken for one of the next
        if self._due:
            self._post(buffer)
        else:
            self._buffers.append(buffer)
        return frames

    def finish(self) -> None:
        left, before = sum(tensor.nbytes for _, tensor, _ in self._sending), 0.0
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, tensor, started in self._sending:
                work.wait()
                ended = time.perf_counter()
                record(f"sending to rank {self.to}", "frame", max(started, before), ended, tensor.nbytes)
                before = ended
        self._sending.clear()

    def _post(self, buffer: Tensor) -> None:
        """Start to receive one more message into `buffer`."""
        count = self._due.popleft()
        with peer_errors(f"receiving from rank {self.source}"):
            work = self._connections.receive(buffer[: self._capacity], self.source, Tag.FRAME)
        self._messages.append((count, work, buffer, time.perf_counter()))
