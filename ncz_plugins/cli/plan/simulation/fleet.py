"""Clocks of all ranks of a group and of their links.

All ranks run the same program. So it is run once, with vectors of times: element r belongs to rank r. If all ranks are
alike, a single element stands for all of them, which makes thousands of ranks cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import Costs

Times = np.ndarray  # seconds, [width]
Places = slice | np.ndarray  # elements of some ranks
ALL = slice(None)


class Ranks(np.ndarray):
    """A rank number for each rank, int64, [width]: element r is, for example, the right neighbour of rank r.

    Schedules calculate with it as with a number, and use it as the key of a mapping.
    """

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Link:
    """Link from each rank to all others.

    Attributes:
        gbps: rate at which a rank can send and receive at the same time, in Gbit/s; a tuple has one rate for each rank.
        latency: seconds from one rank to another.
        flow_gbps: limit of one connection in Gbit/s; None for no limit.
        connections: TCP connections to each other rank.
        burst: bytes that an idle link lets through at once, as behind a token bucket. Connections have no burst.
    """

    gbps: float | tuple[float, ...]
    latency: float = 0.0
    flow_gbps: float | None = None
    connections: int = 1
    burst: float = 0.0


@dataclass(frozen=True)
class Racks:
    """Racks of ranks, each behind one link to all others.

    Attributes:
        ranks: neighboring ranks that share a rack.
        oversubscription: how much faster the links of its ranks are together than that of the rack.
    """

    ranks: int
    oversubscription: float


class Fleet:
    """Ranks of a group: times at which each of them and its link are free.

    Args:
        world_size: number of ranks that exchange frames.
        link: link of a rank.
        costs: costs of a rank.
        sharing: ranks per core, at least 1.
        spare_core: whether a rank has a second core, which decodes.
        late: seconds by which each rank comes late to the call, [world_size]; None: 0.
        apart: whether each rank has an element of its own, even if all are alike.
        racks: racks of the ranks; None if they make no difference.

    Attributes:
        rank: number of each rank, for schedules; 0 if one element stands for all ranks.
        thread: time at which the thread of each rank is free.
        busy: seconds of work of each rank so far.
        bytes_per_second: payload that the link of each rank carries, each way.
        flow_bytes_per_second: payload that the connections from one rank to another carry.
        latency: seconds from one rank to another.
        most_gathered: seconds of sending that an idle link makes up for.
        sharing: ranks per core, at least 1.
        spare_core: see above.
    """

    def __init__(
        self,
        world_size: int,
        link: Link,
        costs: Costs,
        sharing: float = 1.0,
        spare_core: bool = True,
        late: tuple[float, ...] | None = None,
        apart: bool = False,
        racks: Racks | None = None,
    ):
        uneven = apart or racks is not None or late is not None or isinstance(link.gbps, tuple)
        width = world_size if uneven else 1
        self.world_size = world_size
        self.costs = costs
        self.rank = np.arange(width).view(Ranks) if uneven else 0
        self.spare_core = spare_core
        self.sharing = max(1.0, sharing)
        self.bytes_per_second = np.broadcast_to(1.25e8 * costs.link_share * np.asarray(link.gbps, float), [width])
        flow = np.inf if link.flow_gbps is None else link.flow_gbps
        self.flow_bytes_per_second = 1.25e8 * costs.link_share * flow * link.connections
        self._one_flow = np.minimum(self.bytes_per_second, self.flow_bytes_per_second)
        self.latency = link.latency
        self.most_gathered = link.burst / self.bytes_per_second
        self._rack = None
        if racks is not None:
            self._rack = np.arange(world_size) // racks.ranks
            self._rack_bytes_per_second = racks.ranks * self.bytes_per_second.max() / racks.oversubscription
            self._rack_free = np.zeros((2, self._rack[-1] + 1))  # of each rack: out, in
        self.thread: Times = np.zeros(width) + (0.0 if late is None else np.asarray(late, float))
        self._decoder = np.zeros(width)
        self._outgoing = np.zeros(width)
        self._incoming = np.zeros(width)
        self.busy = np.zeros(width)

    @property
    def end(self) -> Times:
        """Time at which the call of each rank is over."""
        return np.maximum(self.thread, self._decoder)

    def work(self, seconds: Times | float, at: Places = ALL) -> None:
        """Have the thread of each rank `at` these places work for `seconds` of a core of its own."""
        self.busy[at] += seconds
        self.thread[at] += self.sharing * seconds

    def handle_message(self, nbytes: Times | float, at: Places = ALL) -> None:
        """Have each rank work to send a message or to receive one: half of the cost of both."""
        self.work(0.5e-6 * self.costs.message_us + 0.5e-12 * self.costs.socket_ps * nbytes, at)

    def handle(self, seconds: float) -> None:
        """Have every rank handle a message of the runtime beneath, which is mostly waiting for threads to wake up.

        Measurements show that the time grows with the square root of the number of ranks that share a core.
        """
        self.busy += seconds
        self.thread += self.sharing**0.5 * seconds

    def decode(self, seconds: Times | float, at: Places = ALL) -> None:
        """Have each rank decode for `seconds`, on its second core if there is one."""
        if not self.spare_core:
            return self.work(seconds, at)
        self.busy[at] += seconds
        self._decoder[at] = np.maximum(self._decoder[at], self.thread[at]) + seconds

    def wait_until(self, times: Times, at: Places = ALL) -> None:
        """Have each rank wait until the given times."""
        self.thread[at] = np.maximum(self.thread[at], times)

    def wait_for_decoder(self) -> None:
        """Have every rank wait until its decoding is done."""
        self.wait_until(self._decoder)

    def transfer(
        self, to: np.ndarray | int, nbytes: Times | float, flow_free: Times | float, at: Places = ALL
    ) -> tuple[Times, Times, Times]:
        """Have each rank send bytes to another rank.

        Args:
            to: receiver of each rank; no two ranks send to the same one.
            nbytes: bytes that each rank sends.
            flow_free: times at which the connections from each rank to its receiver are free.

        Returns three times by sender: when the bytes have left, when the connections are free again, and when the bytes
        arrive.
        """
        to = ALL if self.thread.size == 1 else to
        left = self._leave(nbytes / self.bytes_per_second[at], at)
        flow_free = np.maximum(self.thread[at], flow_free) + nbytes / self.flow_bytes_per_second
        arrival = np.maximum(left, flow_free) + self.latency
        if self._rack is not None:
            arrival = np.maximum(arrival, self._between_racks(to, nbytes, at) + self.latency)
        # Bytes from several ranks to one rank queue in front of its link.
        taken = nbytes / self.bytes_per_second[to]
        self._incoming[to] = np.maximum(self._incoming[to], arrival - taken - self.most_gathered[to]) + taken
        return left, flow_free, np.maximum(arrival, self._incoming[to])

    def _leave(self, seconds: Times | float, at: Places = ALL) -> Times:
        """Times at which bytes that each rank starts to send now have left, if they take its link `seconds`.

        `_outgoing` may lag behind the clock of the thread by the burst of an idle link: the "virtual scheduling
        algorithm" of ITU-T I.371. Links start without a burst, as if another call had just ended.
        """
        now = self.thread[at]
        self._outgoing[at] = np.maximum(now - self.most_gathered[at], self._outgoing[at]) + seconds
        return np.maximum(now, self._outgoing[at])

    def _between_racks(self, to: np.ndarray, nbytes: Times | float, at: Places) -> Times:
        """Times at which bytes that each rank starts to send now have passed the links of racks.

        Bytes that begin together share such a link, and are through at the same time.
        """
        racks = self._rack[at], self._rack[to]
        crossing = np.where(racks[0] != racks[1], nbytes, 0.0)
        passed = np.where(crossing > 0, self.thread[at], 0.0)
        start = self.thread[at].min()
        for rack, free in zip(racks, self._rack_free):
            carried = np.bincount(rack, crossing, minlength=len(free))
            free[:] = np.where(carried > 0, np.maximum(free, start), free) + carried / self._rack_bytes_per_second
            passed = np.where(crossing > 0, np.maximum(passed, free[rack]), passed)
        return passed

    def by_receiver(self, sent: Times | float, to: Ranks | int) -> Times:
        """Numbers by sender, reordered by receiver."""
        sent = np.broadcast_to(sent, self.thread.shape)
        if self.thread.size == 1:
            return sent
        received = np.empty_like(sent)
        received[to] = sent
        return received

    # ---------------------------------------------------------------- messages between all ranks

    def tell_all(self, nbytes: float) -> None:
        """Have every rank send `nbytes` to every other rank, and wait for theirs."""
        others = self.world_size - 1
        self.work(others * (1e-6 * self.costs.message_us + 1e-12 * self.costs.socket_ps * nbytes))
        left = self._leave(others * nbytes / self.bytes_per_second)
        self.thread = np.maximum(self.thread, left.max() + self.latency)

    def tell_neighbors(self, rounds: int, nbytes: float, distance: int = 1) -> None:
        """Have every rank send `nbytes` to the rank `distance` after it, and wait for its own, `rounds` times."""
        to = (self.rank + distance) % self.world_size
        for _ in range(rounds):
            self.work(1e-6 * self.costs.message_us + 1e-12 * self.costs.socket_ps * nbytes)
            _, _, arrival = self.transfer(to, nbytes, 0.0)
            self.wait_until(self.by_receiver(arrival, to))

    def pass_on(self, nbytes: float, message_seconds: float, seconds: float) -> None:
        """Have every rank send `nbytes` to its right neighbour in pieces, and work on those from its left neighbour.

        Args:
            message_seconds: seconds to handle the messages.
            seconds: seconds to work on their contents.
        """
        left = self._leave(nbytes / self._one_flow)
        self.handle(message_seconds)
        self.work(seconds)
        self.wait_until(np.roll(left, 1) + self.latency)
