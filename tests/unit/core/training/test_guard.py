"""The guard: its figures against numpy, which sums it picks, and what an alarm does. All ranks in one process."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import play
from repository import ROOT

from benchmarks import guard as benchmark
from ncz_plugins import AccuracyError
from ncz_plugins.core.config import GuardConfig
from ncz_plugins.core.training import guard
from ncz_plugins.core.training.guard import Guard

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def verify(results, exacts, whole=True, **given):
    """What every rank's guard makes of it; all of them are given back with their findings."""

    def rank(transport):
        own = Guard(GuardConfig(every=1, **given))
        own.verify("weight", results[transport.rank], exacts[transport.rank], whole, transport)
        return own

    return play(len(results), rank)


def finding(result, exact, ranks=2, **given):
    """The one finding where every rank holds all of both; None if there is none."""
    found = [own.findings for own in verify([result] * ranks, [exact] * ranks, **given)]
    assert all(found[0] == other for other in found)
    return found[0][0] if found[0] else None


def by_numpy(compressed, uncompressed):
    """Relative error and cosine, computed in the widest floats there are."""
    c, u = (tensor.double().numpy().astype(np.longdouble) for tensor in (compressed, uncompressed))
    norms = np.sqrt((c**2).sum()), np.sqrt((u**2).sum())
    return float(np.sqrt(((c - u) ** 2).sum()) / norms[1]), float((c * u).sum() / norms[0] / norms[1])


# ------------------------------------------------------------------ figures


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(1, 3000),
    noise=st.sampled_from([0.0, 1e-3, 0.3, 3.0]),
    magnitude=st.integers(-4, 3),  # with noise of 3, more is beyond float16
    ranks=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_figures_are_those_of_numpy(dtype, numel, noise, magnitude, ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(numel, generator=generator) * 10.0**magnitude
    result = (exact + noise * 10.0**magnitude * torch.randn(numel, generator=generator)).to(dtype)
    exact = exact.to(dtype)
    found = finding(result, exact, ranks)
    np.testing.assert_allclose((found.relative_error, found.cosine), by_numpy(result, exact), rtol=1e-9, atol=1e-15)


def test_parts_of_different_lengths_add_up():
    generator = torch.Generator().manual_seed(1)
    exacts = [torch.randn(n, generator=generator) for n in (5, 0, 1000)]
    results = [exact + 0.1 * torch.randn(exact.shape, generator=generator) for exact in exacts]
    found = [own.findings for own in verify(results, exacts, whole=False)]
    assert found[0] == found[1] == found[2]
    np.testing.assert_allclose(found[0][0][1:3], by_numpy(torch.cat(results), torch.cat(exacts)), rtol=1e-12)


def test_more_than_one_piece_and_an_odd_share_leave_nothing_out():
    exact = torch.ones(3 * guard._PIECE_ELEMENTS + 1)
    result = exact.clone()
    result[-1], result[guard._PIECE_ELEMENTS] = 2, 3
    found = finding(result, exact)
    assert found.relative_error == pytest.approx(math.sqrt(5 / exact.numel()), rel=1e-12)


def test_figures_where_a_sum_is_zero_or_empty():
    zero, one = torch.zeros(3), torch.ones(3)
    assert finding(zero, zero)[1:] == (0.0, 1.0, False)
    assert finding(torch.zeros(0), torch.zeros(0))[1:] == (0.0, 1.0, False)
    assert finding(one, zero)[1:] == (math.inf, 0.0, True)
    assert finding(zero, one)[1:] == (1.0, 0.0, True)
    assert finding(-one, one)[1:] == (2.0, -1.0, True)


def test_figures_of_the_smallest_and_the_largest_numbers():
    for dtype in DTYPES[:3]:
        for value in (torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max):
            exact = torch.full((4,), value, dtype=dtype)
            assert finding(exact, exact)[1:] == (0.0, 1.0, False)
            assert finding(exact / 2, exact)[1:3] == (0.5, 1.0)


def test_a_sum_that_overflows_is_not_judged_but_a_result_that_does_is():
    finite = torch.ones(3)
    for value in (math.inf, -math.inf, math.nan):
        broken = torch.tensor([1.0, value, 1.0])
        assert finding(broken, broken) is finding(finite, broken) is None
        assert finding(broken, finite)[1:] == (math.inf, 0.0, True)


def test_a_sum_that_only_its_own_dtype_can_not_hold_is_not_judged():
    """The uncompressed sum is formed in float32; in float16 it would overflow as well, which loss scalers expect."""
    exact = torch.tensor([1.0, 1e5, 1.0])
    assert finding(exact.half(), exact) is None
    assert finding(torch.tensor([1.0, math.inf, 1.0]).half(), exact / 2)[1:] == (math.inf, 0.0, True)


def test_only_one_rank_with_a_broken_part_is_seen_by_all():
    finite, broken = torch.ones(2), torch.tensor([1.0, math.nan])
    assert [own.findings for own in verify([finite, finite], [finite, broken], whole=False)] == [[], []]
    found = [own.findings for own in verify([finite, broken], [finite, finite], whole=False)]
    assert found[0] == found[1] and found[0][0].alarm


# ------------------------------------------------------------------ which sums


def picked(own, calls, steps):
    """For each step, which of its `calls` sums were picked."""
    found = []
    for step in steps:
        found.append([call for call in range(calls) if own.picks(step)])
        own.end_step()
    return found


def test_sums_are_counted_from_the_start_of_each_step():
    own = Guard(GuardConfig())
    for _ in range(3):
        own.picks(0)
    assert own.sums == 3
    own.end_step()
    assert own.sums == 0


@pytest.mark.parametrize("every", [1, 3])
def test_every_sum_has_its_turn(every):
    own = Guard(GuardConfig(every=every))
    assert picked(own, 4, range(every)) == [[0]] + [[]] * (every - 1)  # nobody knows yet how many there are
    found = picked(own, 4, range(every, 9 * every))
    assert found[::every] == [[call] for call in (1, 2, 3, 0, 1, 2, 3, 0)]
    assert all(not calls for step, calls in enumerate(found) if step % every)


def test_the_turns_follow_a_changing_number_of_sums_and_skip_steps_without_any():
    own = Guard(GuardConfig(every=1))
    picked(own, 3, range(3))
    picked(own, 0, range(3, 6))
    assert picked(own, 3, range(6, 9)) == [[0], [1], [2]]
    assert picked(own, 2, [9, 10, 11]) == [[0], [0], [1]]


def test_a_guard_that_is_off_picks_nothing():
    assert picked(Guard(GuardConfig()), 5, range(5)) == [[]] * 5


def test_a_resumed_guard_goes_on_where_it_was():
    own = Guard(GuardConfig(every=1))
    picked(own, 4, range(6))
    own.tightening = 0.25
    resumed = Guard(GuardConfig(every=1))
    resumed.load_state_dict(json.loads(json.dumps(own.state_dict())))
    assert resumed.tightening == 0.25
    assert picked(resumed, 4, range(6, 10)) == picked(own, 4, range(6, 10)) == [[2], [3], [0], [1]]


# ------------------------------------------------------------------ alarms

EXACT = torch.ones(4)


@pytest.mark.parametrize(
    "result, thresholds, alarm",
    [
        ([1.3, 1.3, 1.3, 1.3], {}, False),
        ([1.6, 1.6, 1.6, 1.6], {}, True),  # the relative error is 0.6, the cosine 1
        ([1.6, 1.6, 1.6, 1.6], {"max_relative_error": 0.7}, False),
        ([1.0, 1.0, 0.0, 0.0], {}, True),  # the relative error is 0.707
        ([1.0, 1.0, 0.0, 0.0], {"max_relative_error": 0.71}, False),
    ],
)
def test_alarm_beyond_a_threshold(result, thresholds, alarm):
    assert finding(torch.tensor(result), EXACT, **thresholds).alarm == alarm


def test_warn_is_one_line_on_the_first_rank(capsys):
    guards = verify([3 * EXACT] * 2, [EXACT] * 2, on_alarm="warn")
    for own in guards:
        assert [found.name for found in own.findings] == ["weight"]
        own.end_step()
        assert own.findings == [] and own.tightening == 1
        own.end_step()  # a step without findings
    assert capsys.readouterr().out == (
        "ncz_plugins: step 1: weight: relative error 2, cosine 1 to the uncompressed sum; allowed: a relative error "
        "of at most 0.6. Set a smaller quantizer.value, for all tensors or by a policy for those named here, or raise "
        "guard.max_relative_error\n"
    )


def test_tighten_halves_the_bounds_once_for_each_step_with_alarms(capsys):
    def rank(transport):
        own = Guard(GuardConfig(every=1, on_alarm="tighten"))
        seen = []
        for results in ([3 * EXACT, 4 * EXACT], [EXACT], [3 * EXACT]):
            for result in results:
                own.verify(None, result, EXACT, True, transport)
            own.end_step()
            seen.append(own.tightening)
        return seen

    assert play(2, rank) == [[0.5, 0.5, 0.25]] * 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].count("a tensor without a name") == 2
    assert lines[1].endswith("All bounds are now 0.25 times the configured ones")


def test_bounds_that_no_tightening_helps_never_become_zero(capsys):
    """As with mode bits, when there are no more bits: a state with zero could not be loaded."""

    def rank(transport):
        own = Guard(GuardConfig(every=1, on_alarm="tighten"))
        own.tightening = 2.0**-1074  # the smallest float
        own.verify(None, 3 * EXACT, EXACT, True, transport)
        own.end_step()
        return own.tightening

    assert play(1, rank)[0] > 0


def test_stop_raises_on_every_rank_and_names_everything():
    for own in verify([3 * EXACT] * 2, [EXACT] * 2, on_alarm="stop", max_relative_error=0.9):
        with pytest.raises(AccuracyError) as caught:
            own.end_step()
        for word in ("step 1", "weight", "relative error 2", "cosine 1", "0.9", "quantizer.value", "on_alarm"):
            assert word in str(caught.value)
        assert own.findings == []


# ------------------------------------------------------------------ the documentation


def test_the_figures_in_the_documentation_are_those_that_were_measured(capsys):
    measured = json.loads((ROOT / "benchmarks" / "results" / "guard-4-ranks.json").read_text())
    benchmark.show(measured["rows"])
    assert capsys.readouterr().out in (ROOT / "docs" / "notebook" / "settings.md").read_text()
