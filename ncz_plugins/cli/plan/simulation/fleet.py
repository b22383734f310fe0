"""The clocks of all ranks of a group and of their links.

All ranks run the same program, so it is run once, with one vector of times in place of a time: element r is rank r's.
Where all ranks are alike, one element stands for all of them. That makes thousands of ranks cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import Costs

Times = np.ndarray  # seconds, [width]


class Ranks(np.ndarray):
    """One number of a rank for each rank, int64, [width], as rank r sees it: "the rank to my right", for example.

    Schedules calculate with it as with a number, and use it as the key of a mapping.
    """

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Link:
    """What connects each rank with all others.

    Attributes:
        gbps: that a rank can send while it receives as much, in Gbit/s; a sequence holds one rate for each rank.
        latency: seconds from one rank to another.
        flow_gbps: that one connection can carry; None: as much as the link.
        connections: TCP connections with each other rank.
        burst: bytes that a link which was idle lets through at once, as one behind a token bucket does. Connections
            have none of their own.
    """

    gbps: float | tuple[float, ...]
    latency: float = 0.0
    flow_gbps: float | None = None
    connections: int = 1
    burst: float = 0.0


class Fleet:
    """The ranks of a group: when each is free, and when its link is.

    Args:
        world_size: ranks that send each other frames.
        link: what connects them.
        costs: what they spend.
        sharing: ranks for each core, where there are more ranks than cores; at least 1.
        spare_core: whether a rank has a second core, which decodes.
        late: seconds by which each rank comes late to the call, [world_size]; None: all come at the same time.

    Attributes:
        rank: each rank's number, for schedules; a plain 0 where one stands for all.
        thread: when each rank's thread is free.
        busy: seconds of work of each rank so far.
        bytes_per_second: of payload that each rank's link carries, each way.
        latency: that of `link`.
    """

    def __init__(
        self,
        world_size: int,
        link: Link,
        costs: Costs,
        sharing: float = 1.0,
        spare_core: bool = True,
        late: tuple[float, ...] | None = None,
    ):
        uneven = late is not None or isinstance(link.gbps, tuple)
        width = world_size if uneven else 1
        self.world_size = world_size
        self.costs = costs
        self.rank = np.arange(width).view(Ranks) if uneven else 0
        self.spare_core = spare_core
        self._sharing = max(1.0, sharing)
        self.bytes_per_second = np.broadcast_to(1.25e8 * costs.link_share * np.asarray(link.gbps, float), [width])
        flow = np.inf if link.flow_gbps is None else link.flow_gbps
        self._flow_bytes_per_second = 1.25e8 * costs.link_share * flow * link.connections
        self._one_flow = np.minimum(self.bytes_per_second, self._flow_bytes_per_second)
        self.latency = link.latency
        self._most_gathered = link.burst / self.bytes_per_second
        self.thread: Times = np.zeros(width) + (0.0 if late is None else np.asarray(late, float))
        self._decoder = np.zeros(width)
        self._outgoing = np.zeros(width)
        self._incoming = np.zeros(width)
        self.busy = np.zeros(width)

    @property
    def end(self) -> Times:
        """When each rank's call is over."""
        return np.maximum(self.thread, self._decoder)

    def work(self, seconds: Times | float) -> None:
        """Every rank's thread works for so long, by itself on a core."""
        self.busy = self.busy + seconds
        self.thread = self.thread + self._sharing * seconds

    def handle(self, seconds: float) -> None:
        """Every rank handles a message of the runtime beneath: most of that is waiting for threads to wake up.

        Where several ranks share a core, this takes longer as the root of how many there are, as was measured.
        """
        self.busy = self.busy + seconds
        self.thread = self.thread + self._sharing**0.5 * seconds

    def decode(self, seconds: Times | float) -> None:
        """Every rank decodes for so long, on its second core if there is one."""
        if not self.spare_core:
            return self.work(seconds)
        self.busy = self.busy + seconds
        self._decoder = np.maximum(self._decoder, self.thread) + seconds

    def wait_until(self, times: Times) -> None:
        """Every rank waits until then."""
        self.thread = np.maximum(self.thread, times)

    def wait_for_decoder(self) -> None:
        """Every rank waits until all that it decodes is done."""
        self.wait_until(self._decoder)

    def transfer(self, to: Ranks | int, nbytes: Times | float, flow_free: Times) -> tuple[Times, Times, Times]:
        """Every rank sends bytes to another one.

        Args:
            to: the rank that they go to; no two ranks send to the same one.
            flow_free: when the connections of each rank with that one are free.

        Returns: when they have left each rank, when the connections are free again, and when they arrive, the latter
        by the rank that receives them.
        """
        left = self._leave(nbytes / self.bytes_per_second)
        flow_free = np.maximum(self.thread, flow_free) + nbytes / self._flow_bytes_per_second
        arrival = self.by_receiver(np.maximum(left, flow_free) + self.latency, to)
        # What several ranks send to one at the same time queues in front of its link.
        taken = self.by_receiver(nbytes, to) / self.bytes_per_second
        self._incoming = np.maximum(self._incoming, arrival - taken - self._most_gathered) + taken
        return left, flow_free, np.maximum(arrival, self._incoming)

    def _leave(self, seconds: Times | float) -> Times:
        """When what every rank begins to send now has left it, if that takes its link so long.

        `_outgoing` may fall behind the thread's clock by what a link gathers while it is idle: the "virtual scheduling
        algorithm" of ITU-T I.371. No link has gathered anything at the beginning, as if a call had gone before.
        """
        self._outgoing = np.maximum(self.thread - self._most_gathered, self._outgoing) + seconds
        return np.maximum(self.thread, self._outgoing)

    def by_receiver(self, sent: Times | float, to: Ranks | int) -> Times:
        """What each rank sends, as the rank sees it that it goes to."""
        sent = np.broadcast_to(sent, self.thread.shape)
        if self.thread.size == 1:
            return sent
        received = np.empty_like(sent)
        received[to] = sent
        return received

    # ---------------------------------------------------------------- messages between all ranks

    def tell_all(self, nbytes: float) -> None:
        """Every rank sends so many bytes to every other one, and waits for what these send."""
        others = self.world_size - 1
        self.work(others * (1e-6 * self.costs.message_us + 1e-12 * self.costs.socket_ps * nbytes))
        left = self._leave(others * nbytes / self.bytes_per_second)
        self.thread = np.maximum(self.thread, left.max() + self.latency)

    def tell_neighbors(self, rounds: int, nbytes: float, distance: int = 1) -> None:
        """In each round every rank sends so many bytes to one rank, and waits for what another one sends."""
        for _ in range(rounds):
            self.work(1e-6 * self.costs.message_us + 1e-12 * self.costs.socket_ps * nbytes)
            left = self._leave(nbytes / self._one_flow)
            self.wait_until(np.roll(left, distance) + self.latency)

    def pass_on(self, nbytes: float, message_seconds: float, seconds: float) -> None:
        """Every rank sends so many bytes to its right neighbor in pieces, and works on what comes from the left.

        Args:
            message_seconds, seconds: to handle the messages, and to work on what is in them.
        """
        left = self._leave(nbytes / self._one_flow)
        self.handle(message_seconds)
        self.work(seconds)
        self.wait_until(np.roll(left, 1) + self.latency)
