"""Forks, process groups that end and begin again, and what runs out: errors instead of hangs, and no leaks."""

import pytest
from processes import results, run

SOON = 20.0  # seconds; the time-out is half an hour


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # Large blocks come from the system and go back to it, so that what is held shows, and a limit is felt.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return results(run("faults_life", 2, tmp_path_factory.mktemp("life"), seconds=240, environment=environment))


def test_a_fork_gets_an_error_at_once_and_its_parent_goes_on(ranks):
    for rank in ranks:
        found = rank["forks"]
        for size in ("large", "small"):
            assert found[size].startswith("UnsupportedError") and "is a fork of process" in found[size], found
        assert found["close"] == "fine"
        assert found["parent"] is True


def test_a_rank_without_memory_for_frames_says_so_and_the_others_hear_of_it(ranks):
    others, last = (rank["out of memory"] for rank in ranks)
    assert any(found.startswith("OutOfMemoryError") for found in last), last
    for other, found in zip(others, last):
        assert found == "fine" or found.startswith("OutOfMemoryError"), found
        assert (other == "fine") == (found == "fine") and (other == "fine" or other.startswith("PeerError")), other
    assert ranks[0]["after"] == ranks[1]["after"]


def test_a_communicator_takes_three_descriptors_for_each_peer_and_three_threads(ranks):
    """The first one takes what gloo listens with as well, which all share: four descriptors and a thread."""
    for rank in ranks:
        first, *more = rank["each"]
        assert first["files"] <= 3 + 4 and first["threads"] <= 3 + 1, first
        assert all(each["files"] <= 3 and each["threads"] <= 3 for each in more), more


def test_communicators_that_are_dropped_leave_nothing_behind_without_a_collection_of_garbage(ranks):
    for rank in ranks:
        assert rank["dropped"]["files"] <= 0 and rank["dropped"]["threads"] <= 0, rank["dropped"]


def test_a_rank_that_may_open_too_few_descriptors_says_so_and_the_others_hear_of_it(ranks):
    first, last = ([rank["short of descriptors"][which] for which in ("last", "all")] for rank in ranks)
    for each in (*last, first[1]):
        assert each["found"].startswith("UnsupportedError: connecting 2 ranks takes up to "), each
        assert "run `ulimit -n " in each["found"]
    assert first[0]["found"].startswith("PeerError: rank 1 of 2 can't go on: connecting 2 ranks takes up to "), first
    for each in (*first, *last):
        assert each["seconds"] < SOON and each["next"] == "fine", each


def test_a_hundred_process_groups_and_communicators_leave_nothing_behind(ranks):
    for rank in ranks:
        lives = rank["lives"]
        assert lives["results"] == 1
        assert lives["more"]["files"] <= 0 and lives["more"]["threads"] <= 0, lives
        assert lives["more"]["memory"] < 16 << 20, lives  # 160 KiB each, of which one result has 400
