"""Which schedule is taken where nothing was measured."""

import pytest

from ncz_plugins.core.config import Config
from ncz_plugins.core.group import Group
from ncz_plugins.core.schedules.choice import schedule_for
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.topology import Nodes

MiB = 1 << 20


@pytest.mark.parametrize(
    ("ranks", "nbytes", "gbps", "schedule"),
    [
        (2, 1, None, "direct"),
        (4, 1 << 30, 0.01, "direct"),
        (8, 1, None, "direct"),
        (8, 2 * MiB, 0.5, "direct"),
        (8, 2 * MiB, 0.4, "ring"),
        (8, 2 * MiB - 1, 0.4, "direct"),
        (9, MiB, None, "halving"),
        (16, 4 * MiB - 1, 1.0, "halving"),
        (16, 4 * MiB, 1.0, "direct"),
        (16, 4 * MiB, 0.1, "ring"),
        (17, 1 << 30, 0.1, "halving"),
        (4096, 1, None, "halving"),
        (1, 1, None, "halving"),
    ],
)
def test_the_schedule_without_measurements_follows_from_ranks_size_and_link(ranks, nbytes, gbps, schedule):
    assert schedule_for(ranks, nbytes, gbps) == schedule


@pytest.mark.parametrize(
    ("ranks", "nbytes", "gbps", "schedule"),
    [
        (3, 1, 1.0, "direct"),
        (9, MiB, None, "direct"),
        (16, MiB, 1.0, "direct"),
        (17, MiB, 1.0, "halving"),  # of which each is connected with few others
        (16, 64 * MiB, 0.1, "direct"),
    ],
)
def test_far_ranks_take_the_schedule_of_the_fewest_trips(ranks, nbytes, gbps, schedule):
    assert schedule_for(ranks, nbytes, gbps, trip_seconds=0.025) == schedule
    assert schedule_for(ranks, nbytes, gbps, on_gpu=True, trip_seconds=0.025) == schedule_for(ranks, 1, on_gpu=True)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "direct"), (8, "direct"), (9, "ring"), (4096, "ring")])
def test_gpus_do_not_halve(ranks, schedule):
    assert {schedule_for(ranks, nbytes, on_gpu=True) for nbytes in (1, 1 << 30)} == {schedule}


def test_nodes_choose_for_what_each_of_their_ranks_exchanges():
    config = Config(transport={"link_gbps": 1.0}).resolved()
    ranks = tuple(tuple(range(first, first + 4)) for first in range(0, 40, 4))
    nodes = Nodes(ranks, 0, 0)
    group = Group(Training(config), config, range(40), 0, nodes)
    assert group.schedule_for(9 * MiB, nodes) == "halving" and group.schedule_for(10 * MiB, nodes) == "direct"
    assert group.schedule_for(10 * MiB) == "halving"  # of a call that runs flat
    assert Group(Training(config), config, range(40), 0).schedule_for(10 * MiB) == "halving"
    far = Group(Training(config), config, range(40), 0, nodes, trip_seconds=0.025)
    assert far.schedule_for(9 * MiB, nodes) == "direct"
    given = Config(transport={"schedule": "ring"}).resolved()
    assert Group(Training(given), given, range(40), 0).schedule_for(1) == "ring"
    assert Group(Training(config), config, range(40), 0, auto_schedule="direct").schedule_for(1) == "direct"
