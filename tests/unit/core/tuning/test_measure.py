"""What is tried, and what is not. Real measurements by real ranks are in tests/distributed/test_tuning_ranks.py."""

import pytest
import torch

from ncz_plugins.core.collective import layout_of_sum
from ncz_plugins.core.config import FRAME_BYTES, Config
from ncz_plugins.core.tuning.measure import Subject, measure


class Instant(Subject):
    """Two ranks to which nothing takes time."""

    schedules = ("ring", "direct")
    rank, world_size, exchanging, peers = 0, 2, 2, [(1, 1)]
    config = Config(transport={"frame_bytes": "auto", "min_bytes": "auto"})

    def highest(self, numbers):
        return list(numbers)

    def exchange(self, frame):
        pass

    def plain(self, tensor):
        pass

    def compressed(self, tensor, config):
        pass


def cuts_of(trial):
    config = Config(transport={"frame_bytes": trial.frame_bytes})
    return layout_of_sum(torch.empty(trial.nbytes // 4), Instant.world_size, config)


@pytest.mark.parametrize("seconds", [0.2, 3.0])
def test_ways_that_do_the_same_are_not_told_apart_by_noise(seconds):
    tuned = measure(Instant(), seconds)
    done = {(trial.schedule, cuts_of(trial)) for trial in tuned.trials}
    assert len(done) == len(tuned.trials)
    assert {trial.schedule for trial in tuned.trials} == {"ring", "direct"}
    assert tuned.trials[0].frame_bytes == FRAME_BYTES
