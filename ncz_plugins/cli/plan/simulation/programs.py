"""Ranks that do different things: each writes down what its schedule does, then all run together in the order of time.

`fleet` runs one program for all ranks, which is much faster, but takes a schedule in which all do the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ....core.codec.layout import Layout
from ....core.runtime.statistics import Counters
from ....core.transport.base import FrameStream, FrameTransport
from ....kernels.format import HEADER_BYTES
from .fleet import Fleet
from .sizes import CodeSizes

Program = list[tuple]  # a method of `_Clocks` and its arguments, for each step


class _Frame:
    """Stand-in for a frame, whose size is known once the programs run: see `TimedFrame`."""

    __slots__ = ("addends", "nbytes")


def run_apart(schedule: Callable, fleet: Fleet, layout: Layout, sizes: CodeSizes, counters: Counters) -> None:
    """Run a schedule on all ranks of a fleet, each of which has an element of its own.

    Args:
        schedule: a function of a module of `core.schedules`.
        counters: receive the bytes that a rank sends on average.
    """
    programs = []
    for rank in range(fleet.world_size):
        codec = _WritingCodec(layout)
        schedule(_WritingTransport(codec.program, rank, fleet.world_size), codec, Counters())
        programs.append(codec.program)
    clocks = _Clocks(fleet, sizes)
    clocks.run(programs)
    fleet.thread, fleet.busy = np.maximum(clocks.thread, clocks.left), np.array(clocks.busy)
    fleet.wait_until(np.array(clocks.decoder))
    counters.wire_bytes += int(clocks.sent_bytes / fleet.world_size)


# ---------------------------------------------------------------- writing down


class _WritingTransport(FrameTransport):
    def __init__(self, program: Program, rank: int, world_size: int):
        self._program = program
        self.rank = rank
        self.world_size = world_size

    def streams(self, peers, incoming: Sequence[int], frame_capacity: int, counters: Counters) -> list[FrameStream]:
        return [_WritingStream(self._program, to, source, incoming) for to, source in peers]


class _WritingStream(FrameStream):
    def __init__(self, program: Program, to: int, source: int, incoming: Sequence[int]):
        self._program = program
        self.to = to
        self.source = source
        self._incoming = list(incoming)
        self._frames: list[_Frame] = []

    def send(self, *frames: _Frame) -> None:
        self._program.append((_Clocks.send, self.to, frames))

    def receive(self) -> _Frame:
        if not self._frames:
            self._frames += [_Frame() for _ in range(self._incoming.pop(0))]
            self._program.append((_Clocks.receive, self.source, tuple(self._frames)))
        return self._frames.pop(0)

    def finish(self) -> None:
        pass  # ranks wait at the end of all


class _WritingCodec:
    """Stand-in for `QuantizingCodec`: see `TimedCodec`."""

    frame_capacity = 0
    sums_to_output = True
    encodes_ahead = False

    def __init__(self, layout: Layout):
        self.layout = layout
        self.program: Program = []

    def encode_each(self, places: Iterable[tuple[int, int]]) -> Iterator[_Frame]:
        return (self._sum(segment, index, []) for segment, index in places)

    def sum_each(self, segment: int, frames: Iterable[list[_Frame]]) -> Iterator[_Frame]:
        return (self._sum(segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: int, index: int, frame: _Frame) -> None:
        self.program.append((_Clocks.decode, self._values(segment, index), frame))

    def decode_sum(self, segment: int, index: int, frames: list[_Frame]) -> None:
        self.program.append((_Clocks.decode_sum, self._values(segment, index), frames))

    def _sum(self, segment: int, index: int, frames: list[_Frame]) -> _Frame:
        frame = _Frame()
        self.program.append((_Clocks.sum, self._values(segment, index), frames, frame))
        return frame

    def _values(self, segment: int, index: int) -> int:
        elements = self.layout.frame(segment, index)
        return elements.stop - elements.start


# ---------------------------------------------------------------- running


class _Clocks:
    """What `Fleet` keeps for all ranks at once, rank by rank, with the steps of their programs.

    Attributes:
        thread, decoder: times at which these are free, by rank.
        left: time at which all that a rank has sent has left it.
        busy: seconds of work of each rank so far.
        sent_bytes: what all ranks have sent.
    """

    def __init__(self, fleet: Fleet, sizes: CodeSizes):
        self._fleet = fleet
        self._sizes = sizes
        self.thread, self.busy = fleet.thread.tolist(), fleet.busy.tolist()
        self.decoder, self._outgoing, self._incoming = (each.tolist() for each in fleet.free_from())
        self._rates = fleet.bytes_per_second.tolist()
        self._gathered = fleet.most_gathered.tolist()
        self.left = [0.0] * fleet.world_size
        self.sent_bytes = 0.0
        self._flow_free: dict[tuple[int, int], float] = defaultdict(float)
        self._under_way: dict[tuple[int, int], deque[tuple[tuple[_Frame, ...], float]]] = defaultdict(deque)
        self._waiting: set[tuple[int, int]] = set()
        self._ready: list[tuple[float, int]] = []
        self._known: dict[tuple[str, int], float] = {}

    def run(self, programs: list[Program]) -> None:
        """Run all programs to their ends, always a step of the rank that is furthest behind."""
        at = [0] * len(programs)
        self._ready = [(time, rank) for rank, time in enumerate(self.thread)]
        heapq.heapify(self._ready)
        while self._ready:
            _, rank = heapq.heappop(self._ready)
            program = programs[rank]
            while at[rank] < len(program):
                step, *arguments = program[at[rank]]
                if not step(self, rank, *arguments):
                    break
                at[rank] += 1
                if self._ready and self._ready[0][0] < self.thread[rank]:
                    heapq.heappush(self._ready, (self.thread[rank], rank))
                    break

    def send(self, rank: int, to: int, frames: tuple[_Frame, ...]) -> bool:
        """Send frames in one message: see `Fleet.transfer`."""
        nbytes = sum([frame.nbytes for frame in frames])
        self._handle(rank, nbytes)
        now, key = self.thread[rank], (rank, to)
        leaves = max(now - self._gathered[rank], self._outgoing[rank]) + nbytes / self._rates[rank]
        self._outgoing[rank] = leaves
        self.left[rank] = max(now, leaves)
        self._flow_free[key] = max(now, self._flow_free[key]) + nbytes / self._fleet.flow_bytes_per_second
        arrival = max(now, leaves, self._flow_free[key]) + self._fleet.latency
        taken = nbytes / self._rates[to]
        self._incoming[to] = max(self._incoming[to], arrival - taken - self._gathered[to]) + taken
        self._under_way[key].append((frames, max(arrival, self._incoming[to])))
        self.sent_bytes += nbytes
        if key in self._waiting:
            self._waiting.remove(key)
            heapq.heappush(self._ready, (self.thread[to], to))
        return True

    def receive(self, rank: int, source: int, frames: tuple[_Frame, ...]) -> bool:
        """Receive a message of frames. False if it was not sent yet."""
        key = source, rank
        if not self._under_way[key]:
            self._waiting.add(key)
            return False
        sent, arrival = self._under_way[key].popleft()
        for frame, came in zip(frames, sent):
            frame.nbytes, frame.addends = came.nbytes, came.addends
        self.thread[rank] = max(self.thread[rank], arrival)
        self._handle(rank, sum([frame.nbytes for frame in sent]))
        return True

    def sum(self, rank: int, values: int, frames: list[_Frame], frame: _Frame) -> bool:
        """Encode the sum of frames and of a rank's own values."""
        frame.addends = 1 + sum([each.addends for each in frames])
        seconds = self._seconds("encode", frame.addends) + sum(
            [self._seconds("decode", each.addends) for each in frames]
        )
        frame.nbytes = HEADER_BYTES + self._bits(frame.addends) / 8 * values
        self._work(rank, seconds * values)
        return True

    def decode(self, rank: int, values: int, frame: _Frame) -> bool:
        return self._decode(rank, self._seconds("decode", frame.addends) * values)

    def decode_sum(self, rank: int, values: int, frames: list[_Frame]) -> bool:
        """See `TimedCodec.decode_sum`."""
        seconds = self._seconds("decode", 1) * len(frames) + self._seconds("encode", 1) / 2
        return self._decode(rank, seconds * values)

    def _decode(self, rank: int, seconds: float) -> bool:
        if self._fleet.spare_core:
            self.busy[rank] += seconds
            self.decoder[rank] = max(self.decoder[rank], self.thread[rank]) + seconds
        else:
            self._work(rank, seconds)
        return True

    def _handle(self, rank: int, nbytes: float) -> None:
        costs = self._fleet.costs
        self._work(rank, 0.5e-6 * costs.message_us + 0.5e-12 * costs.socket_ps * nbytes)

    def _work(self, rank: int, seconds: float) -> None:
        self.busy[rank] += seconds
        self.thread[rank] += self._fleet.sharing * seconds

    def _seconds(self, what: str, addends: int) -> float:
        """Seconds to code a value."""
        if (what, addends) not in self._known:
            costs = self._fleet.costs
            picoseconds = costs.coding_times * getattr(costs.coders[self._sizes.coder(addends)], what)
            self._known[what, addends] = 1e-12 * picoseconds
        return self._known[what, addends]

    def _bits(self, addends: int) -> float:
        if ("bits", addends) not in self._known:
            self._known["bits", addends] = self._sizes.bits(addends)
        return self._known["bits", addends]
