"""The guard over real processes: the same figures, the same decisions and the same end on all ranks."""

import pytest
from processes import report, results, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run("guard", 2, tmp_path_factory.mktemp("guard"), seconds=120)


@pytest.fixture(scope="module")
def outcome(finished):
    """What all ranks found, to the bit; what is expected of it each has computed for itself."""
    first, *others = results(finished)
    for other in others:
        differing = [key for key in first if other[key] != first[key] and not key.endswith("expected")]
        assert not differing, f"{differing}\n{report(finished)}"
    return first


@pytest.mark.parametrize("call", ["all_reduce float32", "all_reduce bfloat16", "reduce_scatter"])
def test_the_figures_are_the_true_ones(outcome, call):
    ((name, relative_error, cosine, alarm),) = outcome[call]
    assert name in (call.split()[-1], "scattered") and not alarm
    assert 0.01 < relative_error < 0.3 and 0.95 < cosine < 1
    assert [relative_error, cosine] == pytest.approx(outcome[f"{call}, expected"], rel=1e-5)


def test_verifying_changes_nothing_and_happens_only_if_asked_for(outcome):
    for dtype in ("float32", "bfloat16"):
        assert outcome[f"all_reduce {dtype}, same bits"]
        assert outcome[f"all_reduce {dtype}, off"] == []


def test_what_goes_plain_is_not_verified(outcome):
    assert outcome["plain"] == []


def test_every_bucket_has_its_turn(outcome):
    assert outcome["turns"][::2] == [["embedding"], ["body"], ["head"], ["embedding"], ["body"]]
    assert outcome["turns"][1::2] == [[]] * 5


def test_a_warning_is_one_line_of_the_first_rank_and_the_training_goes_on(outcome, finished):
    assert [alarm for ((_, _, _, alarm),) in outcome["warned"]] == [True, True]
    warnings = [
        [line for line in rank.output.splitlines() if line.startswith("ncz_plugins: step") and "Set a smaller" in line]
        for rank in finished
    ]
    assert [len(lines) for lines in warnings] == [2, 0]
    assert "step 1: body: relative error" in warnings[0][0] and "step 2: body" in warnings[0][1]


def test_tightening_halves_the_bounds_until_the_error_fits(outcome):
    steps = outcome["tightened"]
    alarms = [alarm for _, _, _, alarm, _ in steps]
    halvings = sum(alarms)
    assert 1 <= halvings < len(steps) and alarms == [True] * halvings + [False] * (len(steps) - halvings)
    assert [tightening for *_, tightening in steps] == [0.5 ** min(n, halvings) for n in range(1, len(steps) + 1)]
    errors = [relative_error for _, relative_error, *_ in steps]
    assert errors[: halvings + 1] == sorted(errors[: halvings + 1], reverse=True)
    assert errors[halvings] <= 0.3 < errors[halvings - 1]
    assert errors[halvings:] == pytest.approx([errors[halvings]] * len(errors[halvings:]), rel=0.05)


def test_stopping_is_an_error_on_every_rank_in_the_same_step(outcome):
    number, message = outcome["stopped"]
    assert number == 3
    for word in ("step 4: body: relative error", "cosine", "0.6", "quantizer.value", "guard.on_alarm: warn"):
        assert word in message
