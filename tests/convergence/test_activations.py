"""Experts of simulated ranks get what was sent to them, and the study of activations shows what the default costs."""

from __future__ import annotations

from statistics import fmean

import activations
import pytest
import torch
from activations import DEFAULT, PLAIN, Job
from outcome import interval
from simulated_experts import CHOSEN, EXPERTS, RANKS, ExpertsGPT, Link, Way, arranged, transposed
from tasks import GPTConfig, Text

WIDTH = 128
TABLE = [[3, 0, 2, 5], [1, 4, 0, 2], [0, 0, 0, 7], [6, 1, 1, 0]]
ROWS = sum(map(sum, TABLE))
TINY = Text(torch.float32, GPTConfig(context=16, layers=1, heads=4, width=WIDTH), batch=4)
WAYS = [*activations.QUANTIZERS, *(way for way, _ in activations.CASTS), PLAIN]


def some_rows() -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator) * 10.0 ** torch.arange(-3, 3).repeat(ROWS)[:ROWS, None]


@pytest.mark.parametrize("way", WAYS, ids=Way.describe)
def test_rows_arrive_within_their_bound_and_those_that_stay_are_exact(way):
    rows, link = some_rows(), Link(way)
    arrived, exact = link(rows, TABLE), arranged(rows, TABLE)
    errors = (arrived - exact).abs()
    of_row = exact.square().mean(1).sqrt() if way.mode == "rms" else exact.abs().amax(1)
    if way.mode in ("rms", "rel"):
        assert (errors.amax(1) <= way.value * of_row * (1 + 1e-6)).all()
    elif way.mode != "bits":  # whose scales two rows share
        assert (errors.amax(1) <= of_row / 16).all()
    stays = torch.tensor([i == j for j in range(RANKS) for i in range(RANKS)])
    stays = stays.repeat_interleave(torch.tensor(transposed(TABLE)).view(-1))
    assert torch.equal(arrived[stays], exact[stays])
    assert (errors[~stays] > 0).any() == (way != PLAIN)
    assert link.values == WIDTH * sum(TABLE[i][j] for i in range(RANKS) for j in range(RANKS) if i != j)
    assert 2 < link.bits <= 32


def test_what_comes_back_lies_where_it_came_from():
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()
    there = Link(PLAIN)(rows, TABLE)
    assert torch.equal(Link(PLAIN)(there, transposed(TABLE)), rows)


def test_a_token_gets_the_mixture_of_its_experts():
    torch.manual_seed(0)
    layer = ExpertsGPT(TINY.sizes, Job(PLAIN, PLAIN).links()).blocks[0].mlp
    x = torch.randn(RANKS, 6, WIDTH)
    mixed = layer(x)
    for token, result in zip(x.view(-1, WIDTH), mixed.view(-1, WIDTH)):
        scores = layer.router(token).softmax(0)
        best = scores.argsort(descending=True)[:CHOSEN]
        expected = sum(scores[each] * layer.experts[each](token) for each in best) / scores[best].sum()
        torch.testing.assert_close(result, expected)
    assert 1 <= layer.balance < EXPERTS


def test_a_backward_pass_alone_leaves_the_loss_and_changes_gradients():
    torch.manual_seed(0)
    model = ExpertsGPT(TINY.sizes, Job(PLAIN, PLAIN).links())
    jobs = [Job(PLAIN, DEFAULT), Job(DEFAULT, PLAIN), Job(DEFAULT, DEFAULT), Job(DEFAULT, DEFAULT, "combine")]
    seen = activations.look(0, model, jobs, TINY)
    backward, forward, whole, combine = seen.values()
    assert backward["added"] == 0 < backward["gradient_error"]
    assert forward["added"] != 0 < forward["gradient_error"]
    assert backward["bits"]["dispatch"] == forward["bits"]["combine_back"] == 32
    assert all(bits < 8 for bits in whole["bits"].values())
    assert combine["bits"]["dispatch"] == combine["bits"]["dispatch_back"] == 32 > combine["bits"]["combine"]


def test_a_short_training(tmp_path):
    plain, job = Job(PLAIN, PLAIN, steps=12), Job(DEFAULT, DEFAULT, steps=12)
    runs = {each: activations.train(each, TINY)[1] for each in (plain, job)}
    model, again = activations.train(job, TINY)
    assert {**again, "seconds": 0} == {**runs[job], "seconds": 0}
    seen = activations.look(0, model, [job], TINY)
    [found] = activations.outcomes(runs, seen)
    assert abs(found.added[0]) < 0.05 and found.bits < 6
    assert activations.cells(found)[0].endswith("the default**")
    activations.keep(tmp_path / "kept.jsonl", runs)
    assert activations.kept(tmp_path / "kept.jsonl") == runs


class TestCommittedResults:
    def test_they_are_those_of_the_whole_study(self):
        runs, looks = activations.committed()
        seeds = len({job.seed for job in looks})
        assert seeds >= 3
        assert set(looks) == {job for seed in range(seeds) for job in activations.looks(seed)}
        assert set(runs) >= set(activations.trainings(3))

    def test_the_documentation_shows_them(self):
        found = activations.outcomes(*activations.committed())
        assert activations.markdown(found) in activations.NOTEBOOK.read_text()
        assert activations.markdown(activations.trained(found)) in activations.RESULTS.read_text()

    def test_the_default_is_harmless(self):
        """A change of the default needs a new study."""
        found = activations.outcomes(*activations.committed())
        [default] = [each for each in found if activations.is_default(each.job)]
        added = [record["added"] for record in default.looks]
        assert 100 * (fmean(added) + interval(added)) <= activations.HARMLESS
        assert default.bits < 5
