"""Transport that sends nothing and keeps time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....core.runtime.statistics import Counters
from ....core.transport.base import FrameStream, FrameTransport
from .fleet import Fleet, Ranks, Times


@dataclass(frozen=True)
class TimedFrame:
    """Stand-in for a frame.

    Attributes:
        nbytes: bytes of the frame of each rank, [width], or one number for all.
        addends: number of ranks whose codes it adds up.
    """

    nbytes: Times | float
    addends: int


class TimedTransport(FrameTransport):
    """Stand-in for a transport: frames of one call between the ranks of a fleet."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self.rank = fleet.rank
        self.world_size = fleet.world_size

    def streams(self, peers, incoming: Sequence[int], frame_capacity: int, counters: Counters) -> list[FrameStream]:
        return [TimedStream(self._fleet, to, source, counters) for to, source in peers]


class TimedStream(FrameStream):
    """Stream of frames from every rank to one rank, and to every rank from one rank."""

    def __init__(self, fleet: Fleet, to: Ranks | int, source: Ranks | int, counters: Counters):
        self._fleet = fleet
        self.to = to
        self.source = source
        self._counters = counters
        self._under_way: deque[tuple[TimedFrame, Times]] = deque()
        self._flow_free = np.zeros_like(fleet.thread)
        self._left = fleet.thread

    def send(self, *frames: TimedFrame) -> None:
        [frame] = frames
        self._fleet.handle_message(frame.nbytes)
        self._left, self._flow_free, arrival = self._fleet.transfer(self.to, frame.nbytes, self._flow_free)
        received = TimedFrame(self._fleet.by_receiver(frame.nbytes, self.to), frame.addends)
        self._under_way.append((received, self._fleet.by_receiver(arrival, self.to)))
        self._counters.wire_bytes += int(np.mean(frame.nbytes))

    def exchange(self, frame: TimedFrame) -> None:
        self.send(frame)

    def receive(self) -> TimedFrame:
        frame, arrival = self._under_way.popleft()
        self._fleet.wait_until(arrival)
        self._fleet.handle_message(frame.nbytes)
        return frame

    def finish(self) -> None:
        self._fleet.wait_until(self._left)
