"""One rank misbehaves under DeepSpeed: see the worker. Refusals at the start are in tests/integration."""

import importlib.util
import signal

import pytest
from processes import report, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SOON = 60.0  # half of the time-out of what must end before it


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = {"DS_ACCELERATOR": "cpu"}
    return run("faults_deepspeed", 3, folder, seconds=240, imports="ncz_plugins.deepspeed", environment=environment)


def test_all_ends(finished):
    assert [f.returncode for f in finished] == [0, -signal.SIGKILL, -signal.SIGKILL], report(finished)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_loss_scaler_sees_an_overflow_of_one_rank(stage, finished):
    for rank in finished:
        assert rank.result is not None, report(finished)
        fine, overflown, *later = rank.result["overflow"][stage]
        assert fine["bypasses"] == {} and fine["compressed"] and fine["skipped"] == 0
        assert overflown["bypasses"] == {"non-finite": 1} and overflown["skipped"] == 1
        assert overflown["scale"] == fine["scale"] / 2
        assert overflown["unchanged"] or stage == "3"  # where a rank sees nothing of its weights between steps
        for step in later:
            assert step["bypasses"] == {} and step["compressed"] and step["skipped"] == 1
            assert step["scale"] == overflown["scale"]


# case: (ranks, the errors of those that behave, that of the last, None if it is dead)
CASES = {
    "size": (3, {"MismatchError"}, {"MismatchError"}),
    "flipped": (3, {"FrameError", "PeerError"}, {"PeerError"}),
    "out of memory": (3, {"PeerError"}, {"OutOfMemoryError"}),
    "killed": (3, {"PeerError"}, None),
    "stopped": (2, {"PeerError"}, None),  # after the survivors of the case before began again
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_fails_on_every_rank(case, finished):
    size, others, last = CASES[case]
    for rank in range(size):
        expected = others if rank < size - 1 else last
        if expected is None:
            assert case not in finished[rank].result
            continue
        assert case in finished[rank].result, report(finished)
        first, second = finished[rank].result[case]
        assert first["error"] in expected and first["seconds"] < SOON, first
        assert second["error"] == first["error"], second
    if case == "flipped":
        assert any("checksum" in finished[rank].result[case][0]["message"] for rank in range(size))
