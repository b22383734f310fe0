"""The guard over real processes: the same figures, the same decisions and the same end on all ranks."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from on_rank import digest, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import AccuracyError, Communicator

ELEMENTS = 40_001 * world_size
everyone = [values(r, ELEMENTS) for r in range(world_size)]
exact = sum(tensor.double() for tensor in everyone)


def communicator(group, *, value=0.25, every=1, **guard) -> Communicator:
    return Communicator({"quantizer": {"value": value}, "guard": {"every": every, **guard}}, group)


def guard_of(communicator: Communicator):
    return communicator.training.of_group(communicator.ranks).guard


def finish_step(communicator: Communicator) -> list:
    """The findings of the step, which ends."""
    found = guard_of(communicator).findings
    communicator.end_step()
    return [list(finding) for finding in found]


def step(communicator: Communicator) -> list:
    communicator.all_reduce(everyone[rank].clone(), name="body")
    return finish_step(communicator)


def figures(compressed: torch.Tensor, uncompressed: torch.Tensor) -> list[float]:
    """Relative error and cosine, computed without the guard."""
    c, u = compressed.double(), uncompressed.double()
    return [((c - u).norm() / u.norm()).item(), torch.nn.functional.cosine_similarity(c, u, dim=0).item()]


def require_true(findings: list, wanted_name: str, expected: list[float], group) -> None:
    """Fail unless the one finding of a step has these figures, and is the same to the bit on all ranks."""
    ((name, relative_error, cosine, alarm),) = findings
    assert name == wanted_name and not alarm
    assert 0.01 < relative_error < 0.3 and 0.95 < cosine < 1
    assert [relative_error, cosine] == pytest.approx(expected, rel=1e-5)
    same_on_all_ranks(findings, group)


@ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_figures_of_an_all_reduce_are_the_true_ones_and_verifying_changes_nothing(group, dtype):
    dtype = getattr(torch, dtype)
    with communicator(group) as verified, communicator(group, every=0) as unverified:
        tensor, other = everyone[rank].to(dtype, copy=True), everyone[rank].to(dtype, copy=True)
        verified.all_reduce(tensor, name="weight")
        unverified.all_reduce(other, name="weight")
        expected = figures(tensor, sum(t.to(dtype).double() for t in everyone))
        require_true(finish_step(verified), "weight", expected, group)
        assert digest(tensor) == digest(other)
        assert finish_step(unverified) == []


@ranks(2)
def test_the_figures_of_a_reduce_scatter_are_the_true_ones(group):
    with communicator(group) as one:
        part = torch.empty(ELEMENTS // world_size)
        one.reduce_scatter_single(part, everyone[rank].clone(), dist.ReduceOp.AVG, name="scattered")
        parts = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(parts, part, group=group)
        require_true(finish_step(one), "scattered", figures(torch.cat(parts), exact / world_size), group)


@ranks(2)
def test_what_goes_plain_is_not_verified(group):
    with communicator(group) as one:
        tensor = everyone[rank].clone()
        tensor[0] = float("nan")
        one.all_reduce(tensor, name="not finite")
        assert finish_step(one) == []
        one.all_reduce(everyone[rank][:100].clone(), name="too small")
        assert finish_step(one) == []


@ranks(2)
def test_every_bucket_has_its_turn(group):
    turns = []
    with communicator(group, every=2) as one:
        for _ in range(10):
            names = ("embedding", "body", "head")
            handles = [one.all_reduce(everyone[rank].clone(), async_op=True, name=name) for name in names]
            for handle in handles:
                handle.wait()
            turns.append([finding[0] for finding in finish_step(one)])
    assert turns[::2] == [["embedding"], ["body"], ["head"], ["embedding"], ["body"]]
    assert turns[1::2] == [[]] * 5


@ranks(2)
def test_a_warning_is_one_line_of_the_first_rank_and_the_training_goes_on(group):
    with contextlib.redirect_stdout(io.StringIO()) as printed, communicator(group, value=5.0) as one:
        findings = [step(one) for _ in range(2)]
    assert [alarm for ((_, _, _, alarm),) in findings] == [True, True]
    lines = [
        line
        for line in printed.getvalue().splitlines()
        if line.startswith("ncz_plugins: step") and "Set a smaller" in line
    ]
    assert len(lines) == (2 if rank == 0 else 0)
    if rank == 0:
        assert "step 1: body: relative error" in lines[0] and "step 2: body" in lines[1]
    same_on_all_ranks(findings, group)


@ranks(2)
def test_tightening_halves_the_bounds_until_the_error_fits(group):
    with communicator(group, value=5.0, on_alarm="tighten", max_relative_error=0.3) as one:
        steps = [(*step(one)[0], guard_of(one).tightening) for _ in range(8)]
    alarms = [alarm for _, _, _, alarm, _ in steps]
    halvings = sum(alarms)
    assert 1 <= halvings < len(steps) and alarms == [True] * halvings + [False] * (len(steps) - halvings)
    assert [tightening for *_, tightening in steps] == [0.5 ** min(n, halvings) for n in range(1, len(steps) + 1)]
    errors = [relative_error for _, relative_error, *_ in steps]
    assert errors[: halvings + 1] == sorted(errors[: halvings + 1], reverse=True)
    assert errors[halvings] <= 0.3 < errors[halvings - 1]
    assert errors[halvings:] == pytest.approx([errors[halvings]] * len(errors[halvings:]), rel=0.05)
    same_on_all_ranks(steps, group)


@ranks(2)
def test_stopping_is_an_error_on_every_rank_in_the_same_step(group):
    stopped = None
    with communicator(group, value=5.0, every=3, on_alarm="stop") as one:
        one.training.step = 1  # so that two steps pass before the one that is verified
        for number in range(1, 9):
            try:
                step(one)
            except AccuracyError as error:
                stopped = number, str(error)
                break
    number, message = stopped
    assert number == 3
    for word in ("step 4: body: relative error", "cosine", "0.6", "quantizer.value", "guard.on_alarm: warn"):
        assert word in message
    same_on_all_ranks(stopped, group)
