"""Which schedule is taken where nothing was measured."""

import pytest

from ncz_plugins.core.schedules.choice import schedule_for


@pytest.mark.parametrize("ranks, schedule", [(2, "direct"), (3, "direct"), (8, "direct"), (9, "ring"), (64, "ring")])
def test_the_schedule_without_measurements_follows_from_the_number_of_ranks(ranks, schedule):
    assert schedule_for(ranks) == schedule
