"""A short soak; that its checks find what is wrong; and that it ends when a rank dies."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import drawing
import pytest
import reference
import soak
import torch
from drawing import Call
from reference import Done

CONFIG = {"transport": {"schedule": "ring", "hierarchy": "off"}}
QUANTIZER = {"kind": "error_bound", "mode": "rel", "value": 0.01, "block": 4096, "error_feedback": False}
FED_BACK = QUANTIZER | {"error_feedback": True}
CALL = Call("name", 1, "all_reduce", "float32", 10_000, "SUM", None, "normal", 1.0)
RANKS = 3


def test_a_short_soak_finds_nothing(tmp_path):
    found = soak.soak(seconds=120, ranks=4, seed=1, folder=tmp_path, sessions=4, largest=1 << 20, warm_up=2)
    counts = soak.total(found)
    assert set(counts["collective"]) == set(drawing.COLLECTIVES)
    assert counts["went"]["compressed"] > 0
    assert {one["sessions"] for one in found} == {4}


def test_a_plan_follows_from_its_seed():
    sessions = [drawing.session(3, index, 4, 1 << 20) for index in range(200)]
    assert sessions == [drawing.session(3, index, 4, 1 << 20) for index in range(200)]
    assert sessions != [drawing.session(4, index, 4, 1 << 20) for index in range(200)]
    meetings = [meeting for each in sessions for meeting in each]
    assert {len(meeting.ranks) for meeting in meetings} == {1, 2, 3, 4}
    made = [(call, len(meeting.ranks)) for meeting in meetings for batch in meeting.batches for call in batch]
    calls = [call for call, _ in made]
    assert max(call.elements(ranks) for call, ranks in made) <= 1 << 20
    assert {call.collective for call in calls} == set(drawing.COLLECTIVES)
    assert {call.dtype for call in calls} == {*drawing.FLOATS, *drawing.INTEGERS}
    assert 0 in {call.length for call in calls} and any(call.poison for call in calls)


# ------------------------------------------------------------------ what is wrong is found


def exact(call: Call) -> torch.Tensor:
    """float64, of the whole tensor."""
    return sum(reference.values(call, rank, 0, call.length).double() for rank in range(RANKS))


def bound(call: Call, quantizer: dict = QUANTIZER) -> torch.Tensor:
    """What a sum may be off, element by element."""
    everyone = [reference.values(call, rank, 0, call.length).double().abs() for rank in range(RANKS)]
    largest = [block.max() for block in torch.stack(everyone).amax(0).split(4096)]
    blocks = [each.expand(min(4096, call.length - at * 4096)) for at, each in enumerate(largest)]
    return RANKS * quantizer["value"] * torch.cat(blocks)


def check(call: Call, result: torch.Tensor, quantizer: dict | None = QUANTIZER, *before: Done) -> float | None:
    """As `reference.check` says; without a quantizer the call went plain."""
    done = Done(call, quantizer or QUANTIZER, quantizer is not None, result)
    return reference.check([*before, done], CONFIG, RANKS, 0)


@pytest.mark.parametrize("element", [0, 5000, 9999])
def test_an_error_above_the_bound_is_found(element):
    result = exact(CALL).float()
    assert check(CALL, result) < 1e-4
    result[element] += 0.999 * bound(CALL)[element]
    assert 0.99 < check(CALL, result) < 1
    result[element] = exact(CALL)[element] + 1.001 * bound(CALL)[element]
    with pytest.raises(AssertionError, match=f"element {element} "):
        check(CALL, result)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found(value):
    result = exact(CALL).float()
    result[7] = value
    for quantizer in (QUANTIZER, None):
        with pytest.raises(AssertionError, match="element 7"):
            check(CALL, result, quantizer)


def test_what_must_be_exact_is():
    whole = replace(CALL, data="whole")
    for call in (whole, replace(whole, dtype="int32"), replace(CALL, op="MAX"), replace(CALL, op=None, root=1)):
        everyone = [reference.values(call, rank, 0, call.length) for rank in range(RANKS)]
        result = {"SUM": sum(everyone), "MAX": torch.stack(everyone).amax(0), None: everyone[1]}[call.op]
        call = call if call.op else replace(call, collective="broadcast")
        check(call, result, None)
        result[9] = result[9] + 1 if call.dtype == "int32" else result[9].nextafter(torch.tensor(9.0))
        with pytest.raises(AssertionError, match="element 9"):
            check(call, result, None)


def test_a_lost_nan_is_found():
    call = replace(CALL, poison=((1, 3, float("nan")), (0, 4, float("inf")), (2, 4, float("-inf"))))
    result = exact(call).float()
    assert result[3:5].isnan().all()
    check(call, result, None)
    result[3] = 0
    with pytest.raises(AssertionError, match="element 3"):
        check(call, result, None)


def test_with_error_feedback_errors_must_not_add_up():
    calls = [replace(CALL, seed=seed) for seed in range(4)]
    before: list[Done] = []
    for call in calls[:3]:  # each within its bound, in turns above and below
        sign = (-1) ** len(before)
        result = (exact(call) + sign * 0.4 * bound(call)).float()
        check(call, result, FED_BACK, *before)
        before.append(Done(call, FED_BACK, True, result))
    result = (exact(calls[3]) + 0.9 * bound(calls[3])).float()  # again above: each is within its bound, not the sum
    check(calls[3], result, QUANTIZER)
    with pytest.raises(AssertionError, match="off"):
        check(calls[3], result, FED_BACK, *before)


def test_with_error_feedback_zeros_leave_what_is_kept():
    result = (exact(CALL) + 0.4 * bound(CALL)).float()
    zeros = replace(CALL, data="zero")
    assert not exact(zeros).any()
    check(zeros, torch.zeros_like(result), FED_BACK, Done(CALL, FED_BACK, True, result))


# ------------------------------------------------------------------ its end


def test_the_last_rank_to_fail_is_noticed_while_the_first_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "GRACE", 1.0)
    monkeypatch.setattr(soak, "SILENCE", 20.0)
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["false"]) as last:
        (log := tmp_path / "log").touch()
        try:
            assert "after another one had failed" in soak._watch([first, last], [log, log], 60)
        finally:
            first.kill()


# A rank as far as the run sees it: the second one dies, the first one would go on.
WORKER = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_it_ends_when_a_rank_dies(tmp_path, monkeypatch, capsys):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(soak, "HERE", tmp_path)
    monkeypatch.setattr(soak, "GRACE", 1.0)  # the other rank is not waited for as long as in a real run
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--seconds", "600", "--ranks", "2", "--largest", "1000"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert soak.main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    output = capsys.readouterr()
    assert (Path(re.search(r"logs are in (\S+)", output.out)[1]) / "rank1.log").exists()
    assert f"rank 1 exited with -{signal.SIGKILL.value}" in output.err and "--seed" in output.err
