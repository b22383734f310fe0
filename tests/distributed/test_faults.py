"""One rank misbehaves: every other raises a typed error that says what is wrong, and nothing hangs."""

import signal

import pytest
from processes import DEVICES, report, run

SOON = 60.0  # for a busy machine; half of the time-out of what must end before it


@pytest.fixture(scope="module", params=DEVICES)
def finished(request, tmp_path_factory):
    return run("faults", 4, tmp_path_factory.mktemp("faults"), request.param, seconds=240)


def outcomes(finished, case: str, ranks) -> list:
    for rank in ranks:
        assert finished[rank].result is not None and case in finished[rank].result, report(finished)
    return [finished[rank].result[case] for rank in ranks]


def check_broken(outcome, kinds: set[str]) -> None:
    first, second = outcome
    assert first["error"] in kinds, first
    assert first["seconds"] < SOON, first
    assert second["error"] == first["error"] and second["seconds"] < 1, second


def test_all_ends(finished):
    assert [f.returncode for f in finished] == [0, *[-signal.SIGKILL] * 3], report(finished)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("config", ["quantizer.value is", "0.375 on ranks 0, 2, 3", "0.125 on rank 1"]),
        ("version", ["version", '"0.0.0" on rank 1']),
        ("frame version", ["frame version is 1 on ranks 0, 2, 3, 99 on rank 1"]),
    ],
)
def test_ranks_that_differ_are_refused_at_the_start(case, words, finished):
    for outcome in outcomes(finished, case, range(4)):
        assert outcome["error"] == "MismatchError", report(finished)
        assert all(word in outcome["message"] for word in words), outcome["message"]
        assert outcome["seconds"] < SOON


def test_a_rank_that_does_not_come_is_named(finished):
    for outcome in outcomes(finished, "absent", [0, 3]):
        assert outcome["error"] == "PeerError" and "rank 1 did not say within" in outcome["message"], outcome
        assert outcome["seconds"] < SOON


@pytest.mark.parametrize(
    ("case", "words"),
    [("size", "elements"), ("dtype", "dtype"), ("order", "collective")],
)
def test_different_calls_are_refused_on_every_rank(case, words, finished):
    for outcome in outcomes(finished, case, range(4)):
        check_broken(outcome, {"MismatchError"})
        assert f"{words} " in outcome[0]["message"] and "on rank 3" in outcome[0]["message"]


def test_a_rank_that_does_not_connect_its_gpu_is_told(finished, request):
    if "cuda" not in request.node.callspec.id:
        pytest.skip("is about GPUs")
    for outcome in outcomes(finished, "another device", range(4)):
        check_broken(outcome, {"MismatchError"})
        assert "connecting GPUs" in outcome[0]["message"] and "on rank 3" in outcome[0]["message"]


@pytest.mark.parametrize("case", ["damaged on the ring", "damaged, direct"])
def test_damage_breaks_the_communicator_on_every_rank_at_once(case, finished):
    found = outcomes(finished, case, range(4))
    assert "FrameError" in [outcome[0]["error"] for outcome in found]
    for outcome in found:
        # Before the time-out, with all processes alive: those who saw the damage closed the connections.
        check_broken(outcome, {"FrameError", "PeerError"})
    assert any("version" in outcome[0]["message"] for outcome in found)


def test_a_rank_without_memory_says_so_and_the_others_hear_of_it(finished):
    *others, last = outcomes(finished, "out of memory", range(4))
    check_broken(last, {"OutOfMemoryError"})
    for outcome in others:
        check_broken(outcome, {"PeerError"})


@pytest.mark.parametrize(("case", "size"), [("killed in a node", 4), ("stopped", 3), ("killed", 2)])
def test_a_dead_or_silent_peer_is_noticed(case, size, finished):
    for outcome in outcomes(finished, case, range(size - 1)):
        check_broken(outcome, {"PeerError"})
        assert "look at its log" in outcome[0]["message"]


# ------------------------------------------------------------------ calls that go plain


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run("faults_plain", 3, tmp_path_factory.mktemp("faults_plain"))


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_silent_peer_is_noticed_by_our_time_out(plain, size):
    for outcome in outcomes(plain, f"silent, {size}", range(2)):
        check_broken(outcome, {"PeerError"})
        assert "look at its log" in outcome[0]["message"]


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_dead_peer_at_once(plain, size):
    for outcome in outcomes(plain, f"dead, {size}", range(2)):
        check_broken(outcome, {"PeerError"})
