"""One rank misbehaves: every other raises a typed error that says what is wrong, and nothing hangs."""

import signal

import pytest
from processes import report, run

SECONDS = 4.0  # the time-out the workers configure
SLACK = 15.0  # for a busy machine; far below torch's default time-out


def outcomes(case: str, tmp_path, world_size: int = 3):
    finished = run("faults", world_size, tmp_path, case, seconds=90)
    return finished, [f.result for f in finished]


def check_broken(outcome, kinds: set[str], within: float, told: str) -> None:
    first, second = outcome
    assert first["error"] in kinds, told
    assert first["seconds"] < within + SLACK, told
    assert second["error"] == first["error"] and second["seconds"] - first["seconds"] < 1, told


@pytest.mark.parametrize("case", ["killed", "left"])
def test_a_dead_peer_is_noticed(case, tmp_path):
    finished, found = outcomes(case, tmp_path)
    assert finished[1].returncode == (-signal.SIGKILL if case == "killed" else 0), report(finished)
    for rank in (0, 2):
        check_broken(found[rank], {"PeerError"}, SECONDS, report(finished))


def test_a_stopped_peer_is_noticed_after_the_timeout(tmp_path):
    # The stopped process never ends by itself: `run` kills it.
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not end"):
        run("faults", 3, tmp_path, "stopped", seconds=SECONDS + SLACK)
    for rank in (0, 2):
        text = (tmp_path / f"rank{rank}.json").read_text()
        assert "PeerError" in text and "timeout_seconds" in text


def test_damage_breaks_the_communicator_on_every_rank(tmp_path):
    finished, found = outcomes("damaged", tmp_path)
    seen = [outcome[0]["error"] for outcome in found]
    assert "FrameError" in seen and set(seen) <= {"FrameError", "PeerError"}, report(finished)
    for outcome in found:
        # Well before those who saw the damage end, and before the time-out: the connections were closed.
        check_broken(outcome, {"FrameError", "PeerError"}, 0, report(finished))
    assert any("version" in outcome[0]["message"] for outcome in found)


@pytest.mark.parametrize(
    ("case", "words"),
    [("size", "elements"), ("dtype", "dtype"), ("order", "collective")],
)
def test_different_calls_are_refused_on_every_rank(case, words, tmp_path):
    finished, found = outcomes(case, tmp_path)
    for outcome in found:
        check_broken(outcome, {"MismatchError"}, SECONDS, report(finished))
        assert f"ranks differ in {words}" in outcome[0]["message"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("config", ["quantizer.value is", "0.25 on ranks 0, 2", "0.125 on rank 1"]),
        ("version", ["version", '"0.0.0" on rank 1']),
    ],
)
def test_ranks_that_differ_are_refused_at_the_start(case, words, tmp_path):
    finished, found = outcomes(case, tmp_path)
    for outcome in found:
        assert outcome["error"] == "MismatchError", report(finished)
        assert all(word in outcome["message"] for word in words), outcome["message"]
        assert outcome["seconds"] < SECONDS + SLACK
