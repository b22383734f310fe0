"""Weights over torch.distributed: every worker has every version to the bit, whatever happened to it in between."""

import pytest
from processes import results, run


def test_workers_follow_a_trainer(tmp_path):
    first, trainer, third = results(run("weight_sync", 3, tmp_path))
    assert first["exact"] == third["exact"] == [True] * 6
    whole, *later = trainer["sent"]
    assert all(size < 0.5 * whole for at, size in enumerate(later, 1) if at not in (3, 4))
    assert whole < later[2] < 1.5 * whole and whole < later[3] < 1.5 * whole  # all of it for one, changes for the other
    assert trainer["unpublished"]["error"] == "UnsupportedError" and "sparse" in trainer["unpublished"]["message"]
    for worker in (first, third):  # at once, and then they go on
        for refusal in ("unpublished", "no mapping"):
            assert worker[refusal]["error"] == "MismatchError"
            assert "rank 1 could not publish" in worker[refusal]["message"]
            assert worker[refusal]["seconds"] < 20
    assert trainer["published"] == 7 and first["published"] and third["published"]
    assert "rank 1 publishes" in first["refused"]["message"] and "which publishes" in trainer["refused"]["message"]


def test_a_group_of_some_ranks(tmp_path):
    """Its trainer is not the rank of the group that it is of all, and the others have no part in it."""
    _, worker, trainer = results(run("weight_sync_some", 3, tmp_path))
    assert worker["exact"] == [True] * 4
    assert trainer["sent"][1] < 0.5 * trainer["sent"][0]
    assert trainer["sent"][3] > 0.9 * trainer["sent"][2]  # where only the newest is kept, nothing tells what changed
    for member in (worker, trainer):
        assert member["no member"]["error"] == "UnsupportedError"
        assert "src must be a global rank of this group, one of [1, 2], got 0" in member["no member"]["message"]


@pytest.mark.parametrize("when", ["before", "within"])  # the second version
def test_a_dead_trainer_is_an_error(when, tmp_path):
    published, failed = results(run("weight_sync_death", 2, tmp_path, when))
    assert published == "published"
    assert failed["error"] == "PeerError" and failed["seconds"] < 30
