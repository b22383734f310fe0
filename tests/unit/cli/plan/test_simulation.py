"""Simulated calls against real ones, against arithmetic, and against each other."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import run_decided
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import play

from ncz_plugins.cli.plan.catalogue import load
from ncz_plugins.cli.plan.simulation import calls
from ncz_plugins.cli.plan.simulation.calls import Group
from ncz_plugins.cli.plan.simulation.costs import CodingCosts, Costs
from ncz_plugins.cli.plan.simulation.fleet import Fleet, Link, Racks, Ranks
from ncz_plugins.cli.plan.simulation.programs import run_halving
from ncz_plugins.cli.plan.simulation.sizes import sizes_for
from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.layout import Layout
from ncz_plugins.core.config import CoderCosts, Config
from ncz_plugins.core.errors import ConfigError, UnsupportedError
from ncz_plugins.core.group import Group as RealGroup
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import halving
from ncz_plugins.core.schedules.choice import schedule_for
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.kernels.format import CHUNK

MiB = 1 << 20
COSTS = load().cost("cpu")
FREE = Costs(
    kind="cpu",
    source="nothing costs anything but the link",
    call_us=0,
    message_us=0,
    socket_ps=0,
    measure_ps=0,
    coders={name: CodingCosts(encode=0, decode=0) for name in ("raw", "fixed", "huffman", "rans", "packed")},
    coding_times=1,
    plain_call_us=0,
    plain_message_us=0,
    plain_ps=0,
    cast_ps=0,
    local_gbps=1e9,
    local_us=0,
    link_share=1,
)


def config(schedule="auto", **transport) -> Config:
    return Config(transport={"schedule": schedule, "min_bytes": 0, "link_gbps": 1.0} | transport)


def all_reduce(group: Group, nbytes: int, schedule: str = "auto") -> calls.Timed:
    return calls.compressed(group, "all_reduce", nbytes, config(schedule))


# ------------------------------------------------------------------ beside real calls


def real_wire_bytes(ranks: int, collective: str, nbytes: int, schedule: str) -> float:
    """What a rank sends, on average, in a call between threads."""
    settings = config(schedule)

    def body(transport):
        training = Training(settings)
        group = RealGroup(training, settings, range(ranks), transport.rank)
        numel = nbytes // 4
        x = torch.from_numpy(np.random.default_rng(transport.rank).laplace(size=numel).astype(np.float32))
        if collective == "all_reduce":
            request = Call("all_reduce", x, x, dist.ReduceOp.SUM, parts=[ParameterSlice(None, numel)])
        elif collective == "reduce_scatter":
            output = torch.empty(numel // ranks)
            parts = [ParameterSlice(None, numel)]
            request = Call("reduce_scatter_single", x, output, dist.ReduceOp.SUM, parts=parts)
        else:
            output, own = torch.empty(numel), x[: numel // ranks]
            request = Call("all_gather_single", own, output, parts=[ParameterSlice(None, numel)])
        run_decided(group, request, Host(), transport)
        return training.stats.total.wire_bytes

    return float(np.mean(play(ranks, body, reuse=True)))


@pytest.mark.parametrize("schedule", ["ring", "direct", "halving"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize(("ranks", "nbytes"), [(2, MiB), (3, 3 * MiB), (4, 8 * MiB)])
def test_as_many_bytes_as_real_calls_send(ranks, nbytes, collective, schedule):
    """The schedules are the same code, so what differs is the sample and how scales are counted."""
    simulated = calls.compressed(Group(ranks, 1, Link(1.0), COSTS), collective, nbytes, config(schedule))
    assert simulated.wire_bytes == pytest.approx(real_wire_bytes(ranks, collective, nbytes, schedule), rel=0.06)


# ------------------------------------------------------------------ arithmetic


def test_nothing_is_faster_than_its_bytes():
    nbytes, gbps = 64 * MiB, 2.0
    timed = all_reduce(Group(2, 1, Link(gbps), FREE), nbytes)
    # All is sent once in one direction, and nothing else takes time.
    assert timed.seconds == pytest.approx(8e-9 * timed.wire_bytes / gbps, rel=0.02)
    plain = calls.plain(Group(4, 1, Link(gbps), FREE), "all_reduce", nbytes)
    assert plain.seconds == pytest.approx(1.5 * 8e-9 * nbytes / gbps)
    assert plain.wire_bytes == pytest.approx(1.5 * nbytes)


def test_latency_counts_once_for_each_hop():
    near, far = (calls.plain(Group(8, 1, Link(1.0, each), FREE), "all_reduce", MiB) for each in (0, 0.01))
    assert far.seconds - near.seconds == pytest.approx(2 * 7 * 0.01)


def test_a_flow_that_is_limited():
    """Frames to one peer go no faster than its connections, those to several share the link."""
    nbytes = 64 * MiB
    one = all_reduce(Group(2, 1, Link(10.0, flow_gbps=1.0), FREE), nbytes).seconds
    four = all_reduce(Group(2, 1, Link(10.0, flow_gbps=1.0, connections=4), FREE), nbytes).seconds
    assert one == pytest.approx(4 * four, rel=0.05)
    assert all_reduce(Group(2, 1, Link(1.0), FREE), nbytes).seconds == pytest.approx(one, rel=0.05)


def test_ranks_that_share_a_core_take_turns():
    free_link = Link(1e6)
    alone, shared = (all_reduce(Group(4, 1, free_link, COSTS, cores=each), 16 * MiB).seconds for each in (1.0, 0.5))
    assert shared == pytest.approx(2 * alone, rel=0.05)


@pytest.mark.parametrize("schedule", ["ring", "direct", "halving"])
def test_a_late_rank_delays_all(schedule):
    even = all_reduce(Group(8, 1, Link(1.0), COSTS), 16 * MiB, schedule).seconds
    late = all_reduce(Group(8, 1, Link(1.0), COSTS, late=(0.5,) + 7 * (0.0,)), 16 * MiB, schedule).seconds
    assert late == pytest.approx(even + 0.5, rel=0.1)


@pytest.mark.parametrize("schedule", ["ring", "direct", "halving"])
def test_the_slowest_link_decides(schedule):
    def seconds(gbps):
        return all_reduce(Group(8, 1, Link(gbps), FREE), 64 * MiB, schedule).seconds

    most = 1.2 if schedule == "halving" else 1.001  # which waits for it in each halving
    assert most * seconds(1.0) > seconds((*7 * (10.0,), 1.0)) > 5 * seconds(10.0)


# ------------------------------------------------------------------ one rank for all


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(2, 20),
    nbytes=st.sampled_from([4, 4096, 4 * MiB, 64 * MiB]),
    schedule=st.sampled_from(["ring", "direct"]),
    collective=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
)
def test_one_rank_stands_for_all_that_are_alike(ranks, nbytes, schedule, collective):
    """Where segments are equally long. Else the last ranks have less to do, and one rank stands for the first."""
    nbytes *= ranks
    alike = Group(ranks, 1, Link(1.0, 1e-4), COSTS)
    one_by_one = Group(ranks, 1, Link(ranks * (1.0,), 1e-4), COSTS)
    shared = config(schedule)
    together = calls.compressed(alike, collective, nbytes, shared)
    apart = calls.compressed(one_by_one, collective, nbytes, shared)
    assert together.seconds >= apart.seconds * (1 - 1e-9)
    assert apart.seconds == pytest.approx(together.seconds, rel=0.35 if nbytes < MiB else 0.1)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 13, 40])
def test_ranks_with_equal_routes_share_a_program(ranks, collective):
    """On links that are uneven, with a rank that comes late, in racks. Each rank has a program of its own, or not."""
    segments = 5 if collective == "all_reduce" and ranks > 5 else ranks
    layout, sizes = Layout.of([CHUNK] * (segments - 1) + [100], CHUNK), sizes_for(config())
    found = []
    for alike in (True, False):
        links = Link((*(ranks - 1) * (1.0,), 0.2), 1e-4, flow_gbps=0.9, burst=1e5)
        fleet = Fleet(ranks, links, COSTS, late=(0.01, *(ranks - 1) * (0.0,)), apart=True, racks=Racks(4, 2.0))
        counters = Counters()
        run_halving(getattr(halving, collective), fleet, layout, sizes, counters, alike)
        found.append((fleet, counters.wire_bytes))
    (together, sent), (apart, sent_apart) = found
    assert together.end.max() == pytest.approx(apart.end.max(), rel=0.03)  # frames queue in another order
    assert together.busy == pytest.approx(apart.busy) and sent == sent_apart


def test_messages_do_not_grow_with_the_ranks_where_they_halve():
    """Of a small tensor, whose bytes take no time to speak of."""
    few, many = (Group(ranks, 1, Link(10.0, 5e-5), COSTS) for ranks in (32, 256))
    assert all_reduce(many, MiB, "halving").seconds < 2 * all_reduce(few, MiB, "halving").seconds
    assert all_reduce(many, MiB, "halving").seconds < all_reduce(many, MiB, "direct").seconds / 4


FAR = 0.025  # seconds


@pytest.mark.parametrize(
    ("gbps", "ranks", "trip"),
    [
        *((0.1, ranks, 5e-5) for ranks in (2, 4, 7, 8, 12, 16, 24, 64, 200)),
        *((gbps, ranks, FAR) for gbps in (0.1, 10.0) for ranks in (7, 12, 16)),
        *((gbps, ranks, trip) for gbps in (1.0, 10.0) for ranks, trip in ((24, 5e-5), (200, 5e-5), (16, 0.1))),
        (0.1, 16, 0.1),
    ],
)
def test_auto_takes_about_the_fastest(ranks, trip, gbps):
    """Of the sizes that are compressed by default. What queues of switches do on slow links is not simulated.

    Other links, with fewer ranks, are in tests/unit/core/schedules/test_choice.py.
    """
    group, by_default = Group(ranks, 1, Link(gbps, trip), COSTS), Config(transport={"link_gbps": gbps})
    for nbytes in (256 << 10, MiB, 4 * MiB, 16 * MiB, 128 * MiB):
        if nbytes >= by_default.min_bytes_in_effect(ranks=ranks):
            seconds = {
                schedule: calls.compressed(group, "all_reduce", nbytes, config(schedule, link_gbps=gbps)).seconds
                for schedule in ("direct", "halving", "ring")
            }
            chosen = schedule_for(ranks, nbytes, gbps, trip_seconds=trip)
            assert seconds[chosen] <= 1.3 * min(seconds.values()), (nbytes, chosen, seconds)


def test_auto_is_what_the_ranks_would_choose():
    """A ring, an exchange and halving, each with all that is known of the link."""
    found = set()
    for ranks, gbps, trip in ((16, 0.1, 0.0), (16, 0.1, FAR), (12, 1.0, 0.0), (24, 1.0, 5e-5)):
        group, chosen = Group(ranks, 1, Link(gbps, trip), COSTS), schedule_for(ranks, 4 * MiB, gbps, trip_seconds=trip)
        auto, named = (
            calls.compressed(group, "all_reduce", 4 * MiB, config(schedule, link_gbps=gbps)).seconds
            for schedule in ("auto", chosen)
        )
        assert auto == named, (ranks, gbps, trip, chosen)
        found.add(chosen)
    assert found == {"direct", "halving", "ring"}


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("gbps", [1.0, 25.0])
def test_many_ranks_gain_at_the_least_size_that_they_compress(gbps, collective):
    """By default, and on any link, as uncompressed calls travel around a ring."""
    for ranks in (17, 32, 100):
        group, by_default = Group(ranks, 1, Link(gbps, 5e-5), COSTS), Config(transport={"link_gbps": gbps})
        compressed = calls.compressed(group, collective, 128 << 10, by_default)
        assert compressed.compressed and compressed.seconds < calls.plain(group, collective, 128 << 10).seconds / 1.5


def test_few_bytes_of_halving_leave_a_rack():
    def times(schedule):
        even, racks = (
            all_reduce(Group(64, 1, Link(1.0), FREE, racks=each), 64 * MiB, schedule).seconds
            for each in (None, Racks(16, 8.0))
        )
        return racks / even

    assert times("direct") > 5
    assert times("halving") < 2
    assert times("ring") < 1.2  # nothing but the agreement leaves a rack on more than one connection


def test_thousands_of_ranks():
    for schedule in ("ring", "direct"):
        timed = all_reduce(Group(4096, 1, Link(10.0, 5e-5), COSTS), 64 * MiB, schedule)
        assert timed.seconds > 8e-9 * timed.wire_bytes / 10
        assert timed.wire_bytes > 2 * 4095 * 40  # a header for each of its frames, at least
    hierarchical = calls.compressed(Group(512, 8, Link(80.0, 5e-5), COSTS), "all_reduce", 64 * MiB, config())
    assert hierarchical.seconds < timed.seconds


def test_numbers_of_ranks_serve_as_keys():
    ranks = np.arange(4).view(Ranks)
    right = (ranks + 1) % 4
    assert {right: "right", (ranks - 1) % 4: "left"}[right] == "right"
    assert isinstance(right, Ranks)


def test_what_is_sent_to_a_rank_is_what_it_receives():
    fleet = Fleet(4, Link((1.0,) * 4), FREE)
    right = (fleet.rank + 1) % 4
    assert fleet.by_receiver(np.array([10.0, 11, 12, 13]), right).tolist() == [13, 10, 11, 12]


def test_what_a_link_gathered_while_idle_passes_at_once():
    """By hand: 1 byte takes 1 s, and at most 3 bytes gather."""
    fleet = Fleet(2, Link(8e-9, burst=3), FREE)
    flow_free = np.zeros(1)
    arrivals = []
    for idle, nbytes in ((0, 2), (0, 1), (2, 1), (0, 4), (10, 5)):
        fleet.wait_until(fleet.thread + idle)
        _, _, arrival = fleet.transfer(1, nbytes, flow_free)
        fleet.wait_until(arrival)
        arrivals.append(arrival.item())
    # At first nothing has gathered. 2 s idle let 1 byte pass at once, and the next 4 take 3 s; of 10 s idle 3 count.
    assert arrivals == pytest.approx([2, 3, 5, 8, 20])


# ------------------------------------------------------------------ sizes of codes


def test_sums_take_half_a_bit_more_for_each_doubling():
    sizes = sizes_for(config())
    grown = [sizes.bits(2 * addends) - sizes.bits(addends) for addends in (2, 4, 8, 32, 1024)]  # one coder each
    assert all(0.3 < each < 0.75 for each in grown)
    assert sizes.bits(4) < sizes.bits(5) < sizes.bits(6) < sizes.bits(8)


def test_a_ratio_that_was_measured():
    assert sizes_for(config(), ratio=16).bits(1) == pytest.approx(2)
    assert sizes_for(config(), ratio=16).bits(2) > 2
    assert sizes_for(config(), ratio=16, ratio_ranks=2).bits(1) == pytest.approx(2)
    of_four = sizes_for(config(), ratio=10, ratio_ranks=4)
    assert of_four.bits(1) + of_four.bits(4) == pytest.approx(6.4)


def test_a_fixed_rate():
    chosen = Config(quantizer={"mode": "bits", "value": 4}, transport={"min_bytes": 0, "link_gbps": 1.0})
    assert sizes_for(chosen).bits(1) == pytest.approx(4, abs=0.1)
    assert sizes_for(chosen).bits(3) == pytest.approx(6, abs=0.1)
    group = Group(4, 1, Link(1.0), COSTS)
    timed = calls.compressed(group, "all_reduce", 16 * MiB, chosen)
    assert 16 * MiB * 2 * 3 / 4 / timed.wire_bytes == pytest.approx(2 * 32 / (4 + 6), rel=0.05)


@pytest.mark.parametrize("quantizer", [{"mode": "abs", "value": 0.1}, {"kind": "lossless"}])
def test_what_no_sample_tells(quantizer):
    with pytest.raises(ConfigError, match="give --ratio"):
        sizes_for(Config(quantizer=quantizer)).bits(1)
    assert sizes_for(Config(quantizer=quantizer), ratio=8).bits(1) == pytest.approx(4)


def test_a_bound_that_saves_nothing():
    with pytest.raises(ConfigError, match="nothing would be compressed"):
        sizes_for(Config(quantizer={"mode": "rms", "value": 1e-9})).bits(1)


def test_halving_is_not_planned_for_gpus():
    with pytest.raises(UnsupportedError, match="schedule: halving is for CPUs; set auto, ring or direct"):
        all_reduce(Group(8, 1, Link(1.0), load().cost("gpu")), 16 * MiB, "halving")


# ------------------------------------------------------------------ what goes plain


def test_what_is_small_goes_plain():
    group = Group(2, 1, Link(1.0), COSTS)
    settings = Config(transport={"link_gbps": 1.0})
    assert not calls.compressed(group, "all_reduce", 1000, settings).compressed
    assert calls.compressed(group, "all_reduce", 4 * MiB, settings).compressed
    assert calls.compressed(Group(1, 1, Link(1.0), COSTS), "all_reduce", MiB, config()).seconds == 0


def test_bfloat16_sends_half():
    group = Group(4, 1, Link(1.0), COSTS)
    plain, cast = (calls.plain(group, "all_reduce", 64 * MiB, cast=each) for each in (False, True))
    assert cast.wire_bytes == plain.wire_bytes / 2
    assert plain.seconds / 2 < cast.seconds < plain.seconds


def test_nccl_takes_a_tree_where_a_ring_is_long():
    gpu = load().cost("gpu")
    ring = calls.plain(Group(256, 1, Link(100.0, 5e-5), gpu), "all_gather", MiB)
    tree = calls.plain(Group(256, 1, Link(100.0, 5e-5), gpu), "all_reduce", MiB)
    assert tree.seconds < ring.seconds / 5


def test_coders_as_ncz_tune_measured_them():
    """A tuning file, or entropy.costs, tells what coders take here."""
    slower = CoderCosts(raw=1200, fixed=5000, huffman=14000, rans=2000, rans_rest=4000)
    costs = COSTS.with_coders(slower, "tuned.json")
    assert costs.source.endswith("docs/results/planning.md, coders from tuned.json")
    assert costs.coders["huffman"].encode == costs.coders["huffman"].decode == 7000
    link = Link(1e6)
    fast, slow = (all_reduce(Group(2, 1, link, each), 16 * MiB).busy_seconds for each in (COSTS, costs))
    assert slow > 3 * fast
