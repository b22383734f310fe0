"""What is tried, and what is not. Real measurements by real ranks are in tests/distributed/test_tuning_ranks.py."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from ncz_plugins.core.config import FRAME_BYTES, Config
from ncz_plugins.core.planning import layout_of_sum
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.tuning import measure as module
from ncz_plugins.core.tuning.measure import Subject, measure, measure_link, measure_trip
from ncz_plugins.kernels import cpu_backend


class Instant(Subject):
    """Two ranks to which nothing takes time."""

    schedules = ("ring", "direct")
    rank, world_size, exchanging, peers = 0, 2, 2, [(1, 1)]
    config = Config(transport={"frame_bytes": "auto", "min_bytes": "auto"})

    def highest(self, numbers):
        return list(numbers)

    def exchange(self, frame, times=1):
        pass

    def plain(self, tensor):
        pass

    def compressed(self, tensor, config):
        pass


def cuts_of(trial, link_gbps):
    config = Config(transport={"frame_bytes": trial.frame_bytes, "link_gbps": link_gbps})
    return layout_of_sum(torch.empty(trial.nbytes // 4), Instant.world_size, config)


@pytest.mark.parametrize("seconds", [0.2, 3.0])
def test_ways_that_do_the_same_are_not_told_apart_by_noise(seconds):
    tuned = measure(Instant(), seconds)
    done = {(trial.schedule, cuts_of(trial, tuned.link_gbps)) for trial in tuned.trials}
    assert len(done) == len(tuned.trials)
    assert {trial.schedule for trial in tuned.trials} == {"ring", "direct"}
    assert tuned.trials[0].frame_bytes == FRAME_BYTES


class OverLink(Instant):
    """Two ranks behind a link that limits each connection, and all of them together, and the time that passes there."""

    passes = 0.0  # whenever somebody looks at the clock
    trip = 0.0  # of each message
    one_trip = None  # of a message to the next rank; None: the same
    slower = 1  # times as much as this rank's as coding costs on the other one
    of_a_core = 1.0  # that each of two threads has, from the time that passes while both work

    def __init__(self, connections, opened: int, megabits_each: float, megabits: float):
        self.config = Config(transport={"connections": connections})
        self.transport = SimpleNamespace(channels=opened)
        self.host = Host(two_threads=True)
        self._each, self._together = megabits_each * 1e6 / 8, megabits * 1e6 / 8
        self._clocks, self._begun = threading.local(), 0.0
        self._both = threading.Barrier(2)  # that code

    @property
    def now(self) -> float:
        """By the clock of this thread. Two that begin together find that of the thread which waits for them."""
        if not hasattr(self._clocks, "now") and threading.current_thread() is not threading.main_thread():
            self._both.wait(10)
        return getattr(self._clocks, "now", self._begun)

    @now.setter
    def now(self, seconds):
        self._clocks.now = seconds
        if threading.current_thread() is threading.main_thread():
            self._begun = seconds

    def perf_counter(self):
        self.now += self.passes
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds):
        self.now += seconds

    def thread_time(self):
        return self.of_a_core * self.now

    def highest(self, numbers):
        self.now += self.trip
        if len(numbers) == self.world_size:
            return [max(numbers)] * len(numbers)  # the other rank has as many cores
        return [number * self.slower for number in numbers]

    def tell_next(self):  # and hear from it
        self.now += 2 * (self.trip if self.one_trip is None else self.one_trip)

    def exchange(self, frame, times=1):
        in_use = min(times, self.transport.channels)
        self.now += self.trip + frame.numel() * times / min(self._each * in_use, self._together)


@pytest.mark.parametrize(
    ("connections", "opened", "together", "used", "megabits"),
    [
        ("auto", 8, 1000, 8, 800),
        ("auto", 8, 500, 4, 400),
        ("auto", 8, 100, 1, 100),
        ("auto", 1, 1000, 1, 100),
        (3, 3, 100, 3, 100),
    ],
)
def test_several_connections_are_used_where_they_carry_more(
    connections, opened, together, used, megabits, capsys, monkeypatch
):
    subject = OverLink(connections, opened, 100, together)
    monkeypatch.setattr(module, "time", subject)
    subject.passes = 1e-9
    monkeypatch.setattr(module, "_BURST_SECONDS", 0)  # as hardly any time passes in coding
    found = measure_link(subject, [[0, 1]]).transport
    assert subject.transport.channels == used
    assert 1000 * found.link_gbps == pytest.approx(megabits) and found.min_bytes is None
    said = capsys.readouterr().err
    assert f"the link carries {found.link_gbps:g} Gbit/s" in said
    assert (f"over {used} connections" in said) == (used > 1)
    assert "share cores" not in said


@pytest.mark.parametrize("trip", [0.001, 0.017, 0.1])
def test_on_a_long_way_an_exchange_takes_more_than_its_trip(trip, monkeypatch):
    subject = OverLink(1, 1, 1000, 1000)
    subject.passes, subject.trip = 1e-9, trip
    monkeypatch.setattr(module, "time", subject)
    monkeypatch.setattr(module, "_BURST_SECONDS", 0)
    measure_trip(subject)
    assert subject.transport.trip_seconds == pytest.approx(trip)
    found = measure_link(subject, [[0, 1]]).transport
    assert 1 >= found.link_gbps >= 0.99 * 0.015 / (0.015 + trip)


def test_the_trip_is_that_of_a_message_to_one_rank_and_the_longest_of_all_ranks(monkeypatch):
    subject = OverLink(1, 1, 1000, 1000)
    subject.passes, subject.trip, subject.one_trip, subject.slower = 1e-9, 0.06, 0.01, 3
    monkeypatch.setattr(module, "time", subject)
    monkeypatch.setattr(module, "_BURST_SECONDS", 0)
    measure_trip(subject)
    assert subject.transport.trip_seconds == pytest.approx(3 * 0.01)


class BegunLater(OverLink):
    """Another rank began a trip earlier: its message is there at once, and then takes twice as long, in turns."""

    meetings = 0

    def highest(self, numbers):
        self.meetings += 1
        self.now += self.trip * (self.meetings % 2 * 2 - 1)
        return super().highest(numbers)

    def tell_next(self):
        self.highest([])
        self.now += self.trip


def test_ranks_that_begin_a_trip_apart_measure_the_trip(monkeypatch):
    subject = BegunLater(1, 1, 1000, 1000)
    subject.passes, subject.trip = 1e-9, 0.025
    monkeypatch.setattr(module, "time", subject)
    monkeypatch.setattr(module, "_BURST_SECONDS", 0)
    measure_trip(subject)
    assert subject.transport.trip_seconds == pytest.approx(0.025)
    found = measure_link(subject, [[0, 1]]).transport
    assert 0.4 < found.link_gbps < 1.1


class OneOfFour(OverLink):
    """How many cores the other ones have is told."""

    world_size = 4
    others = ()

    def highest(self, numbers):
        return list(numbers) if len(numbers) != 4 else [*numbers[:1], *self.others]


@pytest.mark.parametrize(("others", "are_shared"), [((1, 1, 1), False), ((1, 1, 0.5), True), ((1, 0.5, 0.5), True)])
def test_one_rank_that_is_busy_with_other_work_changes_nothing(others, are_shared, monkeypatch):
    subject = OneOfFour(1, 1, 100, 100)
    subject.passes, subject.of_a_core, subject.others = 1e-3, 0.15, others
    monkeypatch.setattr(module, "time", subject)
    assert (measure_link(subject, [[0], [1], [2], [3]]).entropy.costs is not None) == are_shared


def test_coders_cost_as_much_as_on_the_slowest_rank(monkeypatch):
    """Ranks whose processors need other kernels have the same settings all the same."""
    subject = OverLink(1, 1, 100, 100)
    subject.passes, subject.of_a_core, subject.slower = 1e-3, 0.25, 3
    monkeypatch.setattr(module, "time", subject)
    costs = measure_link(subject, [[0], [1]]).entropy.costs
    assert costs.fixed == pytest.approx(3 * 2 * cpu_backend().costs.fixed, rel=0.1)


class WithLateNeighbor(OverLink):
    """The other rank of this machine begins to code later, and both have a quarter of what this one has alone."""

    late, alone_until = 0.0, math.inf

    def highest(self, numbers):
        if len(numbers) == 2 and numbers[1] == -math.inf:  # a time
            self.alone_until = numbers[0] + self.late
            return [numbers[0], self.alone_until]
        return super().highest(numbers)

    def thread_time(self):
        return min(self.now, self.alone_until) + max(0.0, self.now - self.alone_until) / 4


@pytest.mark.parametrize(("late", "times"), [(0.0, 2), (0.02, 2), (0.05, 2)])
def test_cores_are_counted_while_all_ranks_of_a_machine_code(late, times, monkeypatch):
    """Or all the time, where one comes so late that there is no such time: then cores are crowded."""
    subject = WithLateNeighbor(1, 1, 100, 100)
    subject.passes, subject.late = 1e-3, late
    monkeypatch.setattr(module, "time", subject)
    costs = measure_link(subject, [[0, 1]]).entropy.costs
    assert costs.fixed == pytest.approx(times * cpu_backend().costs.fixed, rel=0.1)


def test_a_rank_does_not_wait_by_the_clock_of_another_machine(monkeypatch):
    """Copies of a virtual machine can seem to be one machine."""
    subject = WithLateNeighbor(1, 1, 100, 100)
    subject.passes, subject.late = 1e-3, 1e6
    monkeypatch.setattr(module, "time", subject)
    assert measure_link(subject, [[0, 1]]).entropy.costs is None
    assert subject.now < 10


def test_ranks_that_get_no_time_of_a_core_at_all_have_costs_that_are_allowed(monkeypatch):
    subject = OverLink(1, 1, 100, 100)
    subject.passes, subject.of_a_core = 1e-3, 0.0
    monkeypatch.setattr(module, "time", subject)
    assert measure_link(subject, [[0, 1]]).entropy.costs.fixed == 1000 * cpu_backend().costs.fixed


@pytest.mark.parametrize("megabits", [100, 5000])
@pytest.mark.parametrize(("of_a_core", "times"), [(1.0, 1), (0.4, 1), (0.25, 2), (0.125, 4)])
def test_coders_cost_more_where_ranks_share_cores(of_a_core, times, megabits, monkeypatch, capsys):
    subject = OverLink(1, 1, megabits, megabits)
    subject.passes, subject.of_a_core = 1e-3, of_a_core
    monkeypatch.setattr(module, "time", subject)
    found = measure_link(subject, [[0], [1]])
    costs = found.entropy.costs
    assert found.min_bytes_in_effect() == (128 << 10 if megabits == 100 else 8 << 20)
    if times == 1:
        assert costs is None  # those of the kernels
    else:
        known = cpu_backend().costs
        assert costs.fixed == pytest.approx(times * known.fixed, rel=0.1)
        assert costs.huffman == pytest.approx(times * known.huffman, rel=0.1)
    said = capsys.readouterr().err
    assert ("ranks share cores" in said) == (times > 1)
    decoding: list[threading.Thread] = []
    subject.host.submit(lambda: decoding.append(threading.current_thread()))
    subject.host.synchronize()
    assert (decoding == [threading.current_thread()]) == (2 * of_a_core < 1.5)  # where there is no second core
