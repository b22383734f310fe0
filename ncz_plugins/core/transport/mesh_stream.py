"""Frames as messages of a mesh. The thread that encodes a frame also sends it.

Frames take the channels of the mesh in turns. Bytes that do not fit into a socket's buffer leave when the thread next
sends or waits. Gloo would wake up a thread on each side for each frame, and announce each receive before anything is
sent. That takes longer, and takes cores from coding.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from ...kernels.format import HEADER_BYTES
from ..runtime.statistics import Counters
from ..runtime.trace import record, span
from .base import FrameStream, frame_bytes, peer_errors
from .mesh import Incoming, Mesh, Outgoing


class MeshStream(FrameStream):
    """Stream of frames over a mesh.

    Args:
        mesh: connections between the ranks that carry nothing but frames.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(self, mesh: Mesh, to: int, source: int, incoming: int, frame_capacity: int, counters: Counters):
        self._mesh = mesh
        self.to = to
        self.source = source
        self._counters = counters
        self._since = time.perf_counter()  # when the next frame begins, for traces: see `trace.recording`
        self._sending: list[tuple[Outgoing, float, int]] = []
        self._sent = 0
        with peer_errors(f"receiving from rank {source}"):
            self._frames: deque[Incoming] = deque(
                mesh.receive(source, HEADER_BYTES, frame_capacity, index % mesh.channels) for index in range(incoming)
            )

    def send(self, frame: Tensor) -> None:
        with span("send", frame.nbytes), peer_errors(f"sending to rank {self.to}"):
            started = time.perf_counter()
            message = self._mesh.send(self.to, memoryview(frame.numpy()), self._sent % self._mesh.channels)
            self._sending.append((message, started, frame.nbytes))
        self._sent += 1
        self._counters.wire_bytes += frame.nbytes

    def receive(self) -> Tensor:
        message = self._frames.popleft()
        with span("wait", 0, self._counters), peer_errors(f"receiving from rank {self.source}"):
            self._mesh.finish([message])
        nbytes = message.values.nbytes
        # Raises FrameError if this is not a frame.
        frame_bytes(message.values, self._mesh.name_of(self.source), nbytes, nbytes)
        record(f"receiving from rank {self.source}", "frame", self._since, message.ended, nbytes)
        self._since = message.ended
        return torch.frombuffer(message.values, dtype=torch.uint8)

    def finish(self) -> None:
        left = sum(nbytes for message, _, nbytes in self._sending if message.ended is None)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            self._mesh.finish([message for message, _, _ in self._sending])
        before = 0.0
        for message, started, nbytes in self._sending:
            record(f"sending to rank {self.to}", "frame", max(started, before), message.ended, nbytes)
            before = message.ended
        self._sending.clear()
