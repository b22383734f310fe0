"""The quantizers that were tried do what their names say, and the default one does what the library does."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import frontier
import pytest
import torch
from candidates import Candidate, Quantizer, entropy
from frontier import PARTS, PLAIN, Job
from optimizers import LION, Float32Products, optimizers
from ranks import values

from ncz_plugins import kernels
from ncz_plugins.core.bypass import scales_or_bypass
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import measure
from ncz_plugins.core.config import QuantizerConfig

SHAPES = [(64, 300), (7,), (100, 1), (32, 3, 3)]
NUMEL = 64 * 300 + 7 + 100 + 288
GRADIENTS = [values(rank, NUMEL) for rank in range(3)]
EXACT = torch.stack(GRADIENTS).mean(0)
ALL = list(dict.fromkeys(candidate for _, _, some, _, _ in PARTS.values() for candidate in some))
MATRICES = [(300, 64), (64, 300)]  # as Muon trains them
IN_A_LAYER = ["blocks.0.first", "blocks.0.second"]


@pytest.mark.parametrize("candidate", [each for each in ALL if not each.rotated], ids=Candidate.describe)
def test_averages_are_near_and_can_be_repeated(candidate):
    quantizer, again = (Quantizer(candidate, SHAPES, seed=1) for _ in range(2))
    for _ in range(12):
        average = quantizer(GRADIENTS)
        assert torch.equal(average, again(GRADIENTS))
    error = (average - EXACT).norm() / EXACT.norm()
    step = candidate.step
    assert error < 0.02 if step == 0 else 0.05 * min(1, step / 0.25) < error < 0.3 * max(1, step / 0.5)
    assert step == 0 or 1 < quantizer.bits[0] < 3 + math.log2(1 / min(step, 0.5))


@pytest.mark.parametrize("rounding", ["random", "strata", "near zero", "strata near zero"])
def test_random_rounding_has_no_bias(rounding):
    quantizer = Quantizer(Candidate(rounding, "block", 1.0), SHAPES, seed=0)
    mean = torch.stack([quantizer(GRADIENTS) for _ in range(100)]).mean(0)
    error = (quantizer(GRADIENTS) - EXACT).norm()
    assert (mean - EXACT).norm() < error / (2 if rounding.endswith("near zero") else 8)


def test_errors_of_equal_values_cancel_in_strata():
    same = [GRADIENTS[0]] * 3
    errors = {
        rounding: (Quantizer(Candidate(rounding, "row", 1.0), SHAPES, seed=0)(same) - same[0]).norm()
        for rounding in ("random", "strata")
    }
    assert errors["strata"] < errors["random"] / 1.5


def test_error_feedback_loses_nothing_over_many_calls():
    quantizer = Quantizer(Candidate("nearest", "block", 1.0, feedback=1), SHAPES, seed=0)
    total = torch.stack([quantizer(GRADIENTS) for _ in range(50)]).sum(0)
    assert (total - 50 * EXACT).norm() < EXACT.norm()


def test_what_is_apart_is_treated_as_asked():
    names = ["tokens.weight", "bias", "positions.weight", "convolution"]
    sizes = [math.prod(shape) for shape in SHAPES]
    others = Candidate("strata", "block", 0.5, 128)
    for apart, which in (("vectors", [1]), ("embeddings", [0, 2]), ("vectors and embeddings", [0, 1, 2])):
        averages = {}
        for step in (0.0, 0.1):
            quantizer = Quantizer(others._replace(apart=apart, apart_step=step), SHAPES, 0, names)
            for _ in range(12):
                averages[step] = quantizer(GRADIENTS).split(sizes)
            assert quantizer.bits[0] < 32
        for index, exact in enumerate(EXACT.split(sizes)):
            errors = {step: (average[index] - exact).norm() / exact.norm() for step, average in averages.items()}
            assert (errors[0.0] < 1e-6) == (index in which)
            assert errors[0.1] < 0.1 if index in which else errors[0.1] == errors[0.0]


def spectrum(seed: int) -> torch.Tensor:
    """Two matrices whose singular values fall by a factor of two thousand."""
    matrices = []
    for number, (rows, columns) in enumerate(MATRICES):
        left, right = (torch.linalg.qr(values(10 * seed + number, n * 64).view(n, 64))[0] for n in (rows, columns))
        matrices.append((left * torch.logspace(0, -3.3, 64)) @ right.T)
    return torch.cat([each.flatten() for each in matrices])


def test_in_the_basis_of_the_momentum_small_singular_values_survive():
    exact = spectrum(seed=1)
    errors, bits = {}, {}
    for rotated, tilt, sides in ((0, 0, 1), (5, 0, 1), (5, 0.5, 1), (5, 0.5, 2)):
        candidate = Candidate("nearest", "block", 0.1, 128, rotated=rotated, tilt=tilt, sides=sides)
        quantizer = Quantizer(candidate, MATRICES, 0, IN_A_LAYER)
        for _ in range(12):
            average = quantizer([exact, exact])
        found, wanted = (torch.linalg.svdvals(each.view(MATRICES[0])) for each in (average[:19200], exact[:19200]))
        errors[rotated, tilt, sides] = (found / wanted - 1).abs().max()
        bits[rotated, tilt, sides] = quantizer.bits[0]
    assert errors[5, 0, 1] < 0.1 < 1 < errors[0, 0, 1]
    assert bits[5, 0.5, 2] < bits[5, 0.5, 1] < bits[0, 0, 1] - 1


@pytest.mark.parametrize("tilt, sides", [(0, 1), (0.5, 1), (0.5, 2)])
def test_what_rotated_matrices_lose_is_fed_back(tilt, sides):
    candidate = Candidate("nearest", "block", 0.2, 128, feedback=1, apart="rest", rotated=5, tilt=tilt, sides=sides)
    quantizer = Quantizer(candidate, MATRICES, 0, IN_A_LAYER)
    exact = spectrum(seed=1)
    total = torch.stack([quantizer([exact, exact]) for _ in range(50)]).sum(0)
    assert (total - 50 * exact).norm() < exact.norm()


@pytest.mark.parametrize("shape", [(64, 200), (200, 64)])
def test_muon_moves_matrices_as_torch_does_where_it_multiplies_in_float32(shape):
    moved = []
    for multiplying in (nullcontext, Float32Products):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        with multiplying():
            torch.optim.Muon([weight], lr=1, weight_decay=0).step()
        moved.append(weight.data)
    assert (moved[0] - moved[1]).norm() < 2**-7 * moved[0].norm()  # one bfloat16 may differ from the next by that


def test_lion_moves_every_weight_by_the_rate():
    """Against its definition, in two steps of one weight."""
    weight = torch.tensor([1.0])
    [lion] = optimizers("Lion 0.1", {"weight": weight}, sgd_rate=0)
    decay = 0.1 * LION["weight_decay"]
    weight.grad = torch.tensor([3.0])
    lion.step()
    first = (1 - decay) - 0.1
    assert weight.item() == pytest.approx(first)
    weight.grad = torch.tensor([-0.1])  # the momentum is 0.03, of which 0.027 is left, and the gradient adds -0.01
    lion.step()
    assert weight.item() == pytest.approx(first * (1 - decay) - 0.1)


def test_entropy():
    assert entropy(torch.zeros(100)) == 0
    assert entropy(torch.arange(-128, 128).repeat(3)) == pytest.approx(8)


def test_rounding_to_the_nearest_is_what_the_library_does():
    """But for what the library takes off its steps, so that roundings of the arithmetic stay within the bound."""
    quantizer = QuantizerConfig(kind="error_bound", mode="rms", value=0.25, block=4096)
    layout = Layout.split(NUMEL, 1, 1 << 20, quantizer.block_in_effect)
    backend = kernels.cpu_backend()
    agreed = torch.stack([measure(backend, Window(each), layout, range(1), quantizer) for each in GRADIENTS]).amax(0)
    scales = scales_or_bypass(agreed, layout, quantizer, torch.float32, 3, 3)
    total, codes = torch.zeros(2, NUMEL, dtype=torch.int32)
    for each in GRADIENTS:
        backend.quantize(each, scales.inverse_steps, codes)
        total += codes
    ours = torch.empty(NUMEL)
    backend.dequantize(total, scales.scales, ours)
    theirs = Quantizer(Candidate("nearest", "block", 0.5), SHAPES, seed=0)(GRADIENTS)
    assert torch.isclose(ours, theirs, rtol=1e-4).float().mean() > 0.999


def test_the_documentation_shows_the_committed_search():
    done = frontier.committed()
    assert frontier.markdown(frontier.outcomes(done)) in frontier.NOTEBOOK.read_text()
    page = frontier.suite.RESULTS.read_text()
    for mark, table in ((frontier.ELSEWHERE_MARK, frontier.elsewhere), (frontier.MUON_MARK, frontier.muon)):
        assert f"{mark}\n\n{table(done)}\n{mark}" in page


def test_a_short_training(tmp_path, monkeypatch):
    job = Job("digits MLP", "AdamW", Candidate("strata", "block", 0.5, 256), 0, 60, 2)
    plain = job._replace(candidate=PLAIN)
    runs = {each: frontier.train(each) for each in (job, plain)}
    [first, second] = frontier.outcomes(runs)
    assert (first.candidate, second.candidate) == (job.candidate, PLAIN)
    assert abs(first.added[0]) < 0.15 and second.added == [0]
    assert first.bits < 5
    for optimizer in ("SGD", "Muon", "Lion", "AdamW 0.002"):
        assert frontier.train(plain._replace(optimizer=optimizer, steps=12, task="GPT tiny"))["loss"] < 7
    monkeypatch.setattr(frontier, "KEPT", tmp_path / "kept.jsonl")
    frontier.KEPT.write_text("".join(json.dumps(frontier.written(*each)) + "\n" for each in runs.items()))
    assert frontier.kept() == runs
