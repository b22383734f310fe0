"""Ranks that do different things: each kind of rank writes down what its schedule does, then all run in order of time.

`transport` and `codec` run one program for all ranks, which is faster, but takes a schedule in which all do the same.
Time is kept by `fleet` for both. Ranks with equal programs, which differ in their peers only, run together: each step
is made for all of them at once. Of 16,384 ranks that halve there are some ten kinds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ....core.codec.layout import Layout
from ....core.runtime.statistics import Counters
from ....core.schedules.halving import Route, route_of
from ....core.transport.base import FrameStream, FrameTransport
from ....kernels.format import HEADER_BYTES
from .codec import CodingTimes
from .fleet import Fleet
from .sizes import CodeSizes


def run_halving(
    collective: Callable, fleet: Fleet, layout: Layout, sizes: CodeSizes, counters: Counters, alike: bool = True
) -> None:
    """Run a collective on all ranks of a fleet, each of which has an element of its own.

    Args:
        collective: a function of `core.schedules.halving`.
        counters: receive the bytes that a rank sends on average.
        alike: have ranks with equal routes share a program, rather than writing one for each.
    """
    clocks = _Clocks(fleet, sizes, _roles(collective, fleet.world_size, layout, alike))
    clocks.run()
    fleet.wait_until(clocks.left)
    fleet.wait_for_decoder()
    counters.wire_bytes += int(clocks.sent_bytes / fleet.world_size)


# ---------------------------------------------------------------- what ranks do


class Step(NamedTuple):
    """Step of a program. Frames and peers are numbered by each rank for itself, in the order of their use.

    Attributes:
        kind: "send", "receive", "sum", "decode" or "decode_sum".
        frames: frames that are sent, received, added or decoded.
        peer: number of the peer, of "send" and "receive".
        message: number of the message among those to, or from, this peer.
        segment: segment of a frame that is coded, by its place in the rank's route.
        index: number of this frame in its segment.
        result: frame that holds a "sum".
    """

    kind: str
    frames: tuple[int, ...]
    peer: int = 0
    message: int = 0
    segment: int = 0
    index: int = 0
    result: int = 0


class Role(NamedTuple):
    """Ranks with the same program, and segments of the same lengths.

    Attributes:
        steps: the program.
        frames: number of frames that it uses.
        ranks: the ranks, int64, [members].
        peers: their peers, int64, [number of peers, members].
        values: values in each frame that they code, int64, [number of segments, frames of a segment].
    """

    steps: tuple[Step, ...]
    frames: int
    ranks: np.ndarray
    peers: np.ndarray
    values: np.ndarray

    @property
    def messages(self) -> list[int]:
        """Number of messages that a rank gets from each peer."""
        counts = [0] * len(self.peers)
        for step in self.steps:
            counts[step.peer] += step.kind == "receive"
        return counts


@lru_cache(maxsize=16)  # the same calls on other links
def _roles(collective: Callable, world_size: int, layout: Layout, alike: bool) -> list[Role]:
    # Ranks with routes of the same shape have the same program.
    written, members = {}, defaultdict(list)
    for rank in range(world_size):
        route = route_of(rank, world_size, len(layout.lengths))
        peers = list(
            dict.fromkeys([*(leg.peer for leg in route.sums), *(p for s in route.sources.values() for p in s)])
        )
        segments = [segment for leg in route.sums for segment in leg.segments] + list(route.own)
        shape = _shape(route, peers, segments) if alike else rank
        if shape not in written:
            codec = _WritingCodec(layout, segments)
            collective(_WritingTransport(codec, rank, world_size, peers), codec, Counters())
            written[shape] = tuple(codec.steps), codec.frames
        members[shape, tuple(layout.lengths[segment] for segment in segments)].append((rank, peers))
    # They are simulated together if their segments have the same lengths, too.
    firsts, roles = layout.frame_elements * np.arange(layout.frames), []
    for (shape, lengths), each in members.items():
        ranks, peers = (np.array(part, dtype=np.int64) for part in zip(*each))
        values = np.clip(np.array(lengths)[:, None] - firsts, 0, layout.frame_elements)
        roles.append(Role(*written[shape], ranks, peers.T, values))
    return roles


def _shape(route: Route, peers: list[int], segments: list[int]) -> tuple:
    """What a rank does, apart from who its peers are and which segments it codes."""
    number = {peer: at for at, peer in enumerate(peers)}
    return (
        tuple((number[leg.peer], len(leg.segments)) for leg in route.sums),
        tuple(tuple(number[peer] for peer in route.sources.get(segment, ())) for segment in segments),
    )


class _WritingCodec:
    """Stand-in for `QuantizingCodec`, which writes down what is coded. Frames are numbers."""

    frame_capacity = 0
    sums_to_output = True
    encodes_ahead = False

    def __init__(self, layout: Layout, segments: Sequence[int]):
        self.layout = layout
        self.steps: list[Step] = []
        self.frames = 0
        self._place = {segment: at for at, segment in enumerate(segments)}

    def new_frames(self, count: int) -> range:
        self.frames += count
        return range(self.frames - count, self.frames)

    def encode_each(self, places: Iterable[tuple[int, int]]) -> Iterator[int]:
        return (self._sum(segment, index, []) for segment, index in places)

    def sum_each(self, segment: int, frames: Iterable[list[int]]) -> Iterator[int]:
        return (self._sum(segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: int, index: int, frame: int) -> None:
        self.steps.append(Step("decode", (frame,), segment=self._place[segment], index=index))

    def decode_sum(self, segment: int, index: int, frames: list[int]) -> None:
        self.steps.append(Step("decode_sum", tuple(frames), segment=self._place[segment], index=index))

    def _sum(self, segment: int, index: int, frames: list[int]) -> int:
        [made] = self.new_frames(1)
        self.steps.append(Step("sum", tuple(frames), segment=self._place[segment], index=index, result=made))
        return made


class _WritingTransport(FrameTransport):
    def __init__(self, codec: _WritingCodec, rank: int, world_size: int, peers: Sequence[int]):
        self._codec = codec
        self._peers = peers
        self.rank = rank
        self.world_size = world_size

    def streams(self, peers, incoming: Sequence[int], frame_capacity: int, counters: Counters) -> list[FrameStream]:
        return [_WritingStream(self._codec, self._peers.index(to), incoming) for to, _ in peers]


class _WritingStream(FrameStream):
    def __init__(self, codec: _WritingCodec, peer: int, incoming: Sequence[int]):
        self._codec = codec
        self._peer = peer
        self._incoming = incoming
        self._sent = self._received = 0
        self._arrived: list[int] = []

    def send(self, *frames: int) -> None:
        self._codec.steps.append(Step("send", frames, self._peer, self._sent))
        self._sent += 1

    def receive(self) -> int:
        if not self._arrived:
            self._arrived += self._codec.new_frames(self._incoming[self._received])
            self._codec.steps.append(Step("receive", tuple(self._arrived), self._peer, self._received))
            self._received += 1
        return self._arrived.pop(0)

    def finish(self) -> None:
        pass  # ranks wait at the end of all


# ---------------------------------------------------------------- running


@dataclass(eq=False)
class _Group:
    """Members of a role that are at the same step: their numbers in the role, and their ranks."""

    role: int
    step: int
    members: np.ndarray
    ranks: np.ndarray


class _Clocks:
    """Runs the programs of all ranks on a fleet.

    A frame of a rank has a number, that of the rank's first frame plus its own in the program, and so has a message
    that the rank gets.

    Attributes:
        left: time at which all that a rank has sent has left it, [world_size].
        sent_bytes: what all ranks have sent.
    """

    def __init__(self, fleet: Fleet, sizes: CodeSizes, roles: list[Role]):
        self._fleet = fleet
        self._times = CodingTimes(fleet.costs, sizes, fleet.world_size)
        self._roles = roles
        self.left = np.zeros(fleet.world_size)
        self.sent_bytes = 0.0
        # Number the frames and messages of all ranks.
        self._role_of, counted = np.empty(fleet.world_size, int), np.empty((2, fleet.world_size), int)
        for number, role in enumerate(roles):
            self._role_of[role.ranks] = number
            counted[:, role.ranks] = [[role.frames], [sum(role.messages)]]
        self._first_frame, first_message = np.cumsum(counted, axis=1) - counted
        frames, messages = counted.sum(axis=1)
        self._nbytes, self._addends = np.zeros(frames), np.zeros(frames, int)
        self._arrival, self._frames_at = np.full(messages, np.inf), np.zeros(messages, int)
        # Numbers of the first message that each rank gets from each peer, and of the first one that it sends there.
        incoming = {}
        for role in roles:
            starts = np.cumsum([0, *role.messages])[:-1]
            for peer, start in zip(role.peers, starts):
                incoming.update(
                    zip(zip(peer.tolist(), role.ranks.tolist()), (first_message[role.ranks] + start).tolist())
                )
        self._incoming, self._outgoing = (
            [np.array([[incoming[pair] for pair in self._pairs(role, peers, sends)] for peers in role.peers])
             for role in roles]
            for sends in (False, True)
        )  # fmt: skip
        self._flow_free = [np.zeros(role.peers.shape) for role in roles]
        for role, first in zip(roles, self._incoming):
            for step in role.steps:
                if step.kind == "receive":
                    self._frames_at[first[step.peer] + step.message] = self._first_frame[role.ranks] + step.frames[0]

    @staticmethod
    def _pairs(role: Role, peers: np.ndarray, sends: bool) -> Iterator[tuple[int, int]]:
        """(sender, receiver) of each member and its peer."""
        ends = role.ranks.tolist(), peers.tolist()
        return zip(*ends) if sends else zip(*reversed(ends))

    def run(self) -> None:
        """Run all programs to their ends. Ranks send in order of time, as what they send queues at its receiver."""
        woken = [_Group(number, 0, np.arange(len(role.ranks)), role.ranks) for number, role in enumerate(self._roles)]
        sending, order, blocked = [], 0, defaultdict(list)
        while woken or sending or any(blocked.values()):
            for group in woken:
                step = self._next_message(group)
                if step is not None and step.kind == "send":
                    order += 1
                    heapq.heappush(sending, (self._fleet.thread[group.ranks].min(), order, group))
                elif step is not None:
                    blocked[group.role].append(group)
            if sending:
                _, _, group = heapq.heappop(sending)
                to = self._send(self._roles[group.role].steps[group.step], group)
                group.step += 1
                woken = [group]
                for role in set(self._role_of[to].tolist()):  # receivers may have waited for this
                    woken += blocked.pop(role, [])
            else:  # some members wait for others: those that don't wait go on alone
                woken = [part for groups in blocked.values() for group in groups for part in self._parted(group)]
                blocked.clear()

    def _next_message(self, group: _Group) -> Step | None:
        """Run a group until it sends, or wants what was not sent to all yet. Returns that step; None at the end."""
        steps = self._roles[group.role].steps
        while group.step < len(steps):
            step = steps[group.step]
            if step.kind == "send" or (step.kind == "receive" and not self._has_come(step, group).all()):
                return step
            getattr(self, f"_{step.kind}")(step, group)
            group.step += 1
        return None

    def _has_come(self, step: Step, group: _Group) -> np.ndarray:
        """Whether the message that each member wants was sent."""
        return np.isfinite(self._arrival[self._incoming[group.role][step.peer][group.members] + step.message])

    def _parted(self, group: _Group) -> Iterator[_Group]:
        has_come = self._has_come(self._roles[group.role].steps[group.step], group)
        for each in (has_come, ~has_come):
            if each.any():
                yield replace(group, members=group.members[each], ranks=group.ranks[each])

    # ------------------------------------------------------------ steps

    def _send(self, step: Step, group: _Group) -> np.ndarray:
        """Send a message of each member. Returns the receivers."""
        ranks, members = group.ranks, group.members
        to = self._roles[group.role].peers[step.peer][members]
        frames = self._first_frame[ranks][:, None] + step.frames
        nbytes = self._nbytes[frames].sum(axis=1)
        self._fleet.handle_message(nbytes, ranks)
        flow_free = self._flow_free[group.role][step.peer]
        self.left[ranks], flow_free[members], arrival = self._fleet.transfer(to, nbytes, flow_free[members], ranks)
        message = self._outgoing[group.role][step.peer][members] + step.message
        self._arrival[message] = arrival
        received = self._frames_at[message][:, None] + np.arange(len(step.frames))
        self._nbytes[received], self._addends[received] = self._nbytes[frames], self._addends[frames]
        self.sent_bytes += nbytes.sum()
        return to

    def _receive(self, step: Step, group: _Group) -> None:
        ranks = group.ranks
        message = self._incoming[group.role][step.peer][group.members] + step.message
        self._fleet.wait_until(self._arrival[message], ranks)
        self._fleet.handle_message(self._nbytes[self._first_frame[ranks][:, None] + step.frames].sum(axis=1), ranks)

    def _sum(self, step: Step, group: _Group) -> None:
        first, values = self._first_frame[group.ranks], self._values(step, group)
        added = [self._addends[first + frame] for frame in step.frames]
        addends = 1 + sum(added, np.zeros(len(first), int))
        self._fleet.work(self._times.sum(addends, added) * values, group.ranks)
        made = first + step.result
        self._addends[made], self._nbytes[made] = addends, HEADER_BYTES + self._times.bits(addends) / 8 * values

    def _decode(self, step: Step, group: _Group) -> None:
        addends = self._addends[self._first_frame[group.ranks] + step.frames[0]]
        self._fleet.decode(self._times.decode(addends) * self._values(step, group), group.ranks)

    def _decode_sum(self, step: Step, group: _Group) -> None:
        self._fleet.decode(self._times.decode_sum(len(step.frames)) * self._values(step, group), group.ranks)

    def _values(self, step: Step, group: _Group) -> float:
        return float(self._roles[group.role].values[step.segment, step.index])
