"""Non-finite gradients, `no_sync`, other default dtypes, no optimizer, and collectives of the user's own."""

import math
from dataclasses import dataclass

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from on_rank import rank, same_on_all_ranks, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import configuration, engine_of, loss_of, parameters_sha256, train, without_key

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow
on_two_ranks = ranks(2, launcher="torch", **DEEPSPEED)
POISONED_RANK = 1
POISONED = ((3, 5), float("nan")), ((100, 7), float("inf"))  # places in the first weight, and what is put there
CHECKED = {"bf16": {"enabled": True, "check_grad_overflow": True}}


def config(stage: int, key: dict | None = None, **top_level) -> dict:
    return configuration(stage, {"transport": {"min_bytes": 0}, **(key or {})}, **top_level)


NON_FINITE = {"fp32": config(2), "bf16 stage 2": config(2, **CHECKED), "bf16 stage 3": config(3, **CHECKED)}


@dataclass
class Poisoned:
    """Four steps of an engine, in the first of which one rank's gradient of the first weight is not finite."""

    engine: deepspeed.DeepSpeedEngine
    losses: list[float]
    gradients: list[torch.Tensor]  # of the first step, as all ranks have them

    def not_finite(self) -> list[tuple[int, ...]]:
        """The places of elements that are not finite: the number of a parameter, and indices in it."""
        places = [(i, (~gradient.isfinite()).nonzero()) for i, gradient in enumerate(self.gradients)]
        return sorted((i, *place) for i, found in places for place in found.tolist())


def train_poisoned(config: dict) -> Poisoned:
    def poison(gradient):
        gradient = gradient.clone()
        for place, value in POISONED:
            gradient[place] = value
        return gradient

    engine = engine_of(config)
    losses = []
    for step in range(4):
        hook = None
        if step == 0 and rank == POISONED_RANK:
            hook = engine.module[0].weight.register_hook(poison)
        loss = loss_of(engine, step)
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = [safe_get_full_grad(p).clone() for p in engine.module.parameters()]
        if hook:
            hook.remove()
        engine.step()
    return Poisoned(engine, losses, gradients)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.parametrize("case", NON_FINITE)
@on_two_ranks
def test_non_finite_gradients_come_out_on_every_rank_where_they_were(group, case):
    config = NON_FINITE[case]
    ours, plain = train_poisoned(config), train_poisoned(without_key(config))
    # They are there and nowhere else, as that reduction was the plain one. It is counted.
    assert ours.not_finite() == sorted((0, *place) for place, _ in POISONED)
    assert all(map(same_bits, ours.gradients, plain.gradients))
    first, *later = ours.engine.communication_compression.stats.steps
    assert first.bypasses == {"non-finite": 1}

    # Training goes on as in the plain run.
    skipped = ours.engine.skipped_steps
    assert skipped == plain.engine.skipped_steps
    assert ours.losses == pytest.approx(plain.losses, rel=0.05, nan_ok=True)
    same_on_all_ranks(parameters_sha256(ours.engine))

    # DeepSpeed's check, where it is on, skips the step, and compression resumes.
    if "bf16" in config:
        assert skipped == 1
        assert all(map(math.isfinite, ours.losses))
        assert len(later) == 3
        assert all(step.bypasses == {} and step.compressed_calls == 1 for step in later)


@on_two_ranks
def test_a_collective_of_the_users_own_is_exact(group):
    """A large float all-reduce by the user, while an engine compresses."""
    engine = engine_of(config(2))
    engine.backward(loss_of(engine, 0))
    total = engine.communication_compression.stats.total
    calls = total.calls
    everyone = [torch.randn(1 << 18, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
    tensor = everyone[rank].clone()
    deepspeed.comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.stack(everyone).sum(0))
    assert engine.communication_compression.stats.total.calls == calls > 0


@on_two_ranks
def test_no_sync_reduces_once_compressed(group):
    """Two micro-batches, only the second of which reduces."""
    engine = engine_of(config(1))
    stats = engine.communication_compression.stats
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        assert stats.total.calls == 0
    train(engine, range(1, 2))
    assert stats.steps[-1].calls == stats.steps[-1].compressed_calls == 1
    same_on_all_ranks(parameters_sha256(engine))


@pytest.mark.parametrize("stage", [2, 3])
@on_two_ranks
def test_the_default_dtype_of_the_program_changes_no_bit(group, stage):
    dtypes = torch.float32, torch.bfloat16, torch.float64
    assert len({trained_under(dtype, stage) for dtype in dtypes}) == 1


def trained_under(dtype: torch.dtype, stage: int) -> str:
    """The weights after three steps that a program takes whose default dtype is `dtype`, once it has its engine."""
    engine = engine_of(config(stage, {"quantizer": {"error_feedback": True}}))
    torch.set_default_dtype(dtype)
    try:
        train(engine, range(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.communication_compression.stats.total.compressed_calls
    return parameters_sha256(engine)


@on_two_ranks
def test_an_engine_without_an_optimizer_gathers_weights_without_loss(group):
    """Forward passes under ZeRO 3 of an engine that does not train, with its weights compressed and without."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = config(3, {"roles": ["gradient", "parameter"]}, zero_optimization=zero)
    del settings["optimizer"]
    ours, plain = engine_of(settings), engine_of(without_key(settings))
    with torch.no_grad():
        for number in range(2):
            assert loss_of(ours, number).item() == loss_of(plain, number).item()
    total = ours.communication_compression.stats.total
    assert 0 < total.wire_bytes_by_role["parameter"] < total.plain_bytes_by_role["parameter"]
