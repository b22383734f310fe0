"""Frames as messages of a mesh. The thread that encodes a frame also sends it.

Frames take the channels of the mesh in turns. Bytes that do not fit into a socket's buffer leave when the thread next
sends or waits. Gloo would wake up a thread on each side for each frame, and announce each receive before anything is
sent. That takes longer, and takes cores from coding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.format import HEADER_BYTES
from ..errors import FrameError
from ..runtime.statistics import Counters
from ..runtime.trace import record, span
from .base import FrameStream, frames_of
from .mesh import Incoming, Mesh, Outgoing


class MeshStream(FrameStream):
    """Stream of frames over a mesh.

    Args:
        mesh: connections between the ranks that carry nothing but frames.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(
        self, mesh: Mesh, to: int, source: int, incoming: Sequence[int], frame_capacity: int, counters: Counters
    ):
        self._mesh = mesh
        self.to = to
        self.source = source
        self._counters = counters
        self._since = time.perf_counter()  # when the next frame begins, for traces: see `trace.recording`
        self._sending: list[tuple[Outgoing, float, int]] = []
        self._sent = 0
        self._messages: deque[tuple[int, Incoming]] = deque(
            (frames, mesh.receive(source, frames * HEADER_BYTES, frames * frame_capacity, index % mesh.channels))
            for index, frames in enumerate(incoming)
        )
        self._frames: deque[Tensor] = deque()  # that have come in a message with one that was asked for

    def send(self, *frames: Tensor) -> None:
        nbytes = sum([frame.nbytes for frame in frames])
        with span("send", nbytes):
            started = time.perf_counter()
            memories = tuple([memoryview(frame.numpy()) for frame in frames])
            message = self._mesh.send(self.to, memories, self._sent % self._mesh.channels)
            self._sending.append((message, started, nbytes))
        self._sent += 1
        self._counters.wire_bytes += nbytes

    def receive(self) -> Tensor:
        if not self._frames:
            self._frames += self._next_message()
        return self._frames.popleft()

    def _next_message(self) -> list[Tensor]:
        """Wait for a message. Returns its frames. Raises FrameError if it has others."""
        count, message = self._messages.popleft()
        self._await([message], 0)
        nbytes, source = message.values.nbytes, self._mesh.name_of(self.source)
        frames = frames_of(message.values, count, source)
        if sum(map(len, frames)) != nbytes:
            raise FrameError(f"rank {source} sent more than the {count} frames that were due: {nbytes} bytes")
        record(f"receiving from rank {self.source}", "frame", self._since, message.ended, nbytes)
        self._since = message.ended
        return [torch.frombuffer(frame, dtype=torch.uint8) for frame in frames]

    def finish(self) -> None:
        left = sum([nbytes for message, _, nbytes in self._sending if message.ended is None])
        self._await([message for message, _, _ in self._sending], left)
        before = 0.0
        for message, started, nbytes in self._sending:
            record(f"sending to rank {self.to}", "frame", max(started, before), message.ended, nbytes)
            before = message.ended
        self._sending.clear()

    def _await(self, messages: Sequence[Incoming | Outgoing], nbytes: int) -> None:
        """Wait until messages were sent or received, of which so many bytes are still to send. Raises PeerError."""
        if any([message.ended is None for message in messages]):
            with span("wait", nbytes, self._counters):
                self._mesh.finish(messages)
