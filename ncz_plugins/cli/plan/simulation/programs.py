"""Ranks that do different things: each kind of rank writes down what its schedule does, then all run in order of time.

`transport` and `codec` run one program for all ranks, which is faster, but takes a schedule in which all do the same.
Time is kept by `fleet` for both. Ranks with equal programs, which differ in their peers only, run together: each step
is made for all of them at once. Of 16,384 ranks that halve there are some ten kinds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        values: values in a frame that is coded.
        result: frame that holds a "sum".
    """

    kind: str
    frames: tuple[int, ...]
    peer: int = 0
    message: int = 0
    values: int = 0
    result: int = 0


class Role(NamedTuple):
    """Ranks with the same program.

    Attributes:
        steps: the program.
        frames: number of frames that it uses.
        ranks: the ranks, int64, [members].
        peers: their peers, int64, [number of peers, members].
    """

    steps: tuple[Step, ...]
    frames: int
    ranks: np.ndarray
    peers: np.ndarray

    @property
    def messages(self) -> list[int]:
        """Number of messages that a rank gets from each peer."""
        counts = [0] * len(self.peers)
        for step in self.steps:
            counts[step.peer] += step.kind == "receive"
        return counts


@lru_cache(maxsize=16)  # the same calls on other links
def _roles(collective: Callable, world_size: int, layout: Layout, alike: bool) -> list[Role]:
    members = defaultdict(list)
    for rank in range(world_size):
        route = route_of(rank, world_size, len(layout.lengths))
        peers = list(
            dict.fromkeys([*(leg.peer for leg in route.sums), *(p for s in route.sources.values() for p in s)])
        )
        members[_shape(route, peers, layout) if alike else rank].append((rank, peers))
    roles = []
    for ranks, peers in (zip(*each) for each in members.values()):
        codec = _WritingCodec(layout)
        collective(_WritingTransport(codec, ranks[0], world_size, peers[0]), codec, Counters())
        place = np.array(ranks), np.array(peers, dtype=np.int64).T.reshape(len(peers[0]), len(ranks))
        roles.append(Role(tuple(codec.steps), codec.frames, *place))
    return roles


def _shape(route: Route, peers: list[int], layout: Layout) -> tuple:
    """What a rank does, apart from who its peers are and what its segments are called."""
    number = {peer: at for at, peer in enumerate(peers)}
    segments = [segment for leg in route.sums for segment in leg.segments] + list(route.own)
    return (
        tuple((number[leg.peer], len(leg.segments)) for leg in route.sums),
        tuple(tuple(number[peer] for peer in route.sources.get(segment, ())) for segment in segments),
        tuple(layout.lengths[segment] for segment in segments),
    )


class _WritingCodec:
    """Stand-in for `QuantizingCodec`, which writes down what is coded. Frames are numbers."""

    frame_capacity = 0
    sums_to_output = True
    encodes_ahead = False

    def __init__(self, layout: Layout):
        self.layout = layout
        self.steps: list[Step] = []
        self.frames = 0

    def new_frames(self, count: int) -> range:
        self.frames += count
        return range(self.frames - count, self.frames)

    def encode_each(self, places: Iterable[tuple[int, int]]) -> Iterator[int]:
        return (self._sum(segment, index, []) for segment, index in places)

    def sum_each(self, segment: int, frames: Iterable[list[int]]) -> Iterator[int]:
        return (self._sum(segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: int, index: int, frame: int) -> None:
        self.steps.append(Step("decode", (frame,), values=self._values(segment, index)))

    def decode_sum(self, segment: int, index: int, frames: list[int]) -> None:
        self.steps.append(Step("decode_sum", tuple(frames), values=self._values(segment, index)))

    def _sum(self, segment: int, index: int, frames: list[int]) -> int:
        [made] = self.new_frames(1)
        self.steps.append(Step("sum", tuple(frames), values=self._values(segment, index), result=made))
        return made

    def _values(self, segment: int, index: int) -> int:
        elements = self.layout.frame(segment, index)
        return elements.stop - elements.start


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


class _Group(NamedTuple):
    """Members of a role that are at the same step."""

    role: int
    step: int
    members: np.ndarray


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
        self._times = CodingTimes(fleet.costs, sizes)
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
        """Run all programs to their ends, always a step of the ranks that are furthest behind."""
        ready = [_Group(number, 0, np.arange(len(role.ranks))) for number, role in enumerate(self._roles)]
        heap = [(self._time(group), order, group) for order, group in enumerate(ready)]
        heapq.heapify(heap)
        order, blocked = len(heap), defaultdict(list)
        while heap or any(blocked.values()):
            if not heap:  # some members wait for others: those that don't wait go on alone
                woken = [part for groups in blocked.values() for group in groups for part in self._parted(group)]
                blocked.clear()
            else:
                _, _, group = heapq.heappop(heap)
                role = self._roles[group.role]
                step = role.steps[group.step]
                if step.kind == "receive" and not self._has_come(group).all():
                    blocked[group.role].append(group)
                    continue
                getattr(self, f"_{step.kind}")(step, group.role, group.members)
                woken = [group._replace(step=group.step + 1)] if group.step + 1 < len(role.steps) else []
                if step.kind == "send":  # receivers may have waited for this
                    for number in set(self._role_of[role.peers[step.peer][group.members]].tolist()):
                        woken += blocked.pop(number, [])
            for each in woken:
                order += 1
                heapq.heappush(heap, (self._time(each), order, each))

    def _time(self, group: _Group) -> float:
        return self._fleet.thread[self._roles[group.role].ranks[group.members]].min()

    def _has_come(self, group: _Group) -> np.ndarray:
        """Whether the message that each member wants was sent."""
        step = self._roles[group.role].steps[group.step]
        return np.isfinite(self._arrival[self._incoming[group.role][step.peer][group.members] + step.message])

    def _parted(self, group: _Group) -> Iterator[_Group]:
        has_come = self._has_come(group)
        yield from (group._replace(members=group.members[each]) for each in (has_come, ~has_come) if each.any())

    # ------------------------------------------------------------ steps

    def _send(self, step: Step, role: int, members: np.ndarray) -> None:
        ranks, to = self._roles[role].ranks[members], self._roles[role].peers[step.peer][members]
        frames = self._first_frame[ranks][:, None] + step.frames
        nbytes = self._nbytes[frames].sum(axis=1)
        self._fleet.handle_message(nbytes, ranks)
        flow_free = self._flow_free[role][step.peer]
        self.left[ranks], flow_free[members], arrival = self._fleet.transfer(to, nbytes, flow_free[members], ranks)
        message = self._outgoing[role][step.peer][members] + step.message
        self._arrival[message] = arrival
        received = self._frames_at[message][:, None] + np.arange(len(step.frames))
        self._nbytes[received], self._addends[received] = self._nbytes[frames], self._addends[frames]
        self.sent_bytes += nbytes.sum()

    def _receive(self, step: Step, role: int, members: np.ndarray) -> None:
        ranks, message = self._roles[role].ranks[members], self._incoming[role][step.peer][members] + step.message
        self._fleet.wait_until(self._arrival[message], ranks)
        self._fleet.handle_message(self._nbytes[self._first_frame[ranks][:, None] + step.frames].sum(axis=1), ranks)

    def _sum(self, step: Step, role: int, members: np.ndarray) -> None:
        ranks = self._roles[role].ranks[members]
        added = [self._addends[self._first_frame[ranks] + frame] for frame in step.frames]
        addends = 1 + sum(added, np.zeros(len(ranks), int))
        self._fleet.work(self._times.sum(addends, added) * step.values, ranks)
        made = self._first_frame[ranks] + step.result
        self._addends[made], self._nbytes[made] = addends, HEADER_BYTES + self._times.bits(addends) / 8 * step.values

    def _decode(self, step: Step, role: int, members: np.ndarray) -> None:
        ranks = self._roles[role].ranks[members]
        addends = self._addends[self._first_frame[ranks] + step.frames[0]]
        self._fleet.decode(self._times.decode(addends) * step.values, ranks)

    def _decode_sum(self, step: Step, role: int, members: np.ndarray) -> None:
        self._fleet.decode(self._times.decode_sum(len(step.frames)) * step.values, self._roles[role].ranks[members])
