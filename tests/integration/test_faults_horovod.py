"""One rank misbehaves under Horovod: see the worker. Elastic training and refusals have files of their own."""

import json

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

SOON = 60.0  # half of the time-out of what must end before it


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    command = horovod_ranks(WORKERS / "horovod_faults.py", "living")
    return launch(command, tmp_path_factory.mktemp("living"), timeout=200).ranks


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", ["tensor: shape is [300000] on rank 0, [299999] on rank 1"]),
        ("config", ["quantizer.value is 0.25 on rank 0, 0.125 on rank 1"]),
        ("version", ['version is "0.1" on rank 0, "0.0" on rank 1']),
    ],
)
def test_ranks_that_differ_are_refused(case, words, living):
    for rank in living:
        assert rank[case]["error"] == "MismatchError", rank[case]
        assert all(word in rank[case]["message"] for word in words), rank[case]["message"]


def test_a_fork_gets_an_error_at_once(living):
    assert [rank["fork"] for rank in living] == ["UnsupportedError"] * 2


@pytest.mark.parametrize("schedule", ["direct", "ring"])
def test_a_damaged_frame_ends_the_reduction_where_it_arrives(schedule, living):
    first, last = (rank[f"flipped, {schedule}"] for rank in living)
    assert first["error"] == "FrameError" and "checksum" in first["message"]
    if schedule == "direct":  # two ranks sum in one round: this one got whole frames only, so its sum is right
        assert last is None
    else:
        assert last["error"] == "HorovodInternalError" and last["seconds"] < SOON, last


def test_so_does_a_rank_without_memory(living):
    first, last = (rank["out of memory, ring"] for rank in living)
    assert first["error"] == "HorovodInternalError" and first["seconds"] < SOON, first
    assert last["error"] == "OutOfMemoryError"


def test_a_ring_that_broke_is_opened_again(living):
    assert [rank["opened again"] for rank in living] == [[True] * 3] * 2


def test_a_rank_may_initialize_horovod_again(living):
    assert [rank["initialized again"] for rank in living] == [True] * 2


@pytest.mark.parametrize("case", ["killed", "stopped"])
def test_the_others_notice_a_rank_that_is_lost(case, tmp_path):
    command = horovod_ranks(WORKERS / "horovod_faults.py", case, ranks=3)
    launch(command, tmp_path, timeout=200, fails=True, environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"})
    lost = [json.loads((tmp_path / f"rank{rank}.json").read_text())["lost"] for rank in (0, 1)]
    for error in (error for of_rank in lost for error in of_rank):
        assert error["error"] == "HorovodInternalError" and error["seconds"] < SOON, error
    if case == "stopped":  # who notices it first closes its connections, which the other may notice in turn
        assert any("transport.timeout_seconds" in first["message"] for first, _ in lost)
