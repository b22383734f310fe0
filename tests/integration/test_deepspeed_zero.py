"""Compressed gradients under every ZeRO stage, beside a plain run in the same processes."""

import pytest

pytest.importorskip("deepspeed")

import torch
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from on_rank import same_on_all_ranks, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import KEY, configuration, engine_of, loss_of, parameters_sha256, without_key

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow

BOUND = 2e-4  # of each rank's contribution to each reduction, in the gradients' own unit
ACCUMULATION = 2
STEPS = 4
BF16_ROUNDING = 2.0**-7  # two roundings of half a unit in the last place, as a share of the value


def case(stage: int, dtype: str = "fp32", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration in which every gradient, however small, is compressed."""
    how = {
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    key = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
    return configuration(stage, key, **how | top_level)


ALL_REDUCE = {"reduce_scatter": False}
EIGHT_BITS = {"quantizer": {"mode": "bits", "value": 8}, "transport": {"min_bytes": 0}}
# Small buckets, and more ways of reducing: test_deepspeed_feedback.py, element by element.
CASES = {
    **{f"{dtype} stage {stage}": case(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")},
    "fp32 stage 1 without reduce_scatter": case(1, zero=ALL_REDUCE),
    "bf16 stage 3 without reduce_scatter": case(3, "bf16", zero=ALL_REDUCE),
    **{f"fp32 stage {stage} overlapping": case(stage, zero={"overlap_comm": True}) for stage in (2, 3)},
    "fp32 stage 2 overlapping without reduce_scatter": case(2, zero={**ALL_REDUCE, "overlap_comm": True}),
    "fp32 stage 0 prescaled": case(0, prescale_gradients=True),
    "fp32 stage 1 sent as bf16": case(1, communication_data_type="bf16"),
    "fp32 stage 2 at a fixed rate": case(2, zero={"overlap_comm": True}, communication_compression=EIGHT_BITS),
    "bf16 stage 3 at a fixed rate": case(3, "bf16", communication_compression=EIGHT_BITS),
    "bf16 stage 1 accumulating in fp32": case(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
}


@pytest.mark.parametrize("name", CASES)
@ranks(2, launcher="torch", seconds=280, **DEEPSPEED)
def test_two_ranks_train_as_without_compression(group, name):
    trains_as_without_compression(CASES[name])


@pytest.mark.parametrize("name", ["fp32 stage 2", "bf16 stage 3"])
@ranks(3, launcher="torch", **DEEPSPEED)
def test_an_odd_number_of_ranks_trains_as_without_compression(group, name):
    """Parts are padded."""
    trains_as_without_compression(CASES[name])


def trains_as_without_compression(config: dict) -> None:
    """Train with a configuration as it stands, and without our key, side by side."""
    # Both engines live at the same time: one's compression must not leak into the other.
    ours, plain = engine_of(config), engine_of(without_key(config))
    assert plain.communication_compression is None
    losses, plain_losses = [], []
    for batch in range(STEPS * ACCUMULATION):
        for engine, found in ((ours, losses), (plain, plain_losses)):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            found.append(loss.item())
        if batch == ACCUMULATION - 1:  # the only step that both take from the same weights
            gradients_stay_within_the_bound(config, ours, plain)
        ours.step()
        plain.step()

    # The loss follows the plain run. It is the same before the first update.
    assert losses[:ACCUMULATION] == plain_losses[:ACCUMULATION]
    assert losses == pytest.approx(plain_losses, rel=0.01)
    assert losses != plain_losses

    same_on_all_ranks(parameters_sha256(ours))
    full_weights_are_exact(config, ours)
    every_gradient_is_compressed(config, ours)
    ours.destroy()
    plain.destroy()
    ours.communication_compression.close()


def gradients_stay_within_the_bound(config: dict, ours, plain) -> None:
    pairs = [
        (safe_get_full_grad(a).float(), safe_get_full_grad(b).float())
        for a, b in zip(ours.module.parameters(), plain.module.parameters())
    ]
    error = max((a - b).abs().max().item() for a, b in pairs)
    largest = max(b.abs().max().item() for _, b in pairs)
    bound = world_size * BOUND
    if config[KEY] == EIGHT_BITS:
        # Half a step of each rank, whose gradients before the average may be a few times as large.
        bound = 4 * largest / (2 * 127)
    if reduced_as_bf16(config):
        bound += BF16_ROUNDING * largest
    slack = 1e-6 * largest  # of float32 in the plain run
    assert 0 < error <= bound * reductions_per_step(config) + slack


def full_weights_are_exact(config: dict, engine) -> None:
    """`safe_get_full_fp32_param` gives what the model holds, for each parameter that it knows."""
    parameters = list(engine.module.parameters())
    with zero.GatheredParameters(parameters):
        full = [(safe_get_full_fp32_param(p), p) for p in parameters]
        known = [(weights, p) for weights, p in full if weights is not None]
        assert all(torch.equal(weights.to(p.dtype), p) for weights, p in known)
    # Without ZeRO there are no partitions that DeepSpeed would have to put together.
    assert len(known) == 6 or config["zero_optimization"]["stage"] == 0


def every_gradient_is_compressed(config: dict, engine) -> None:
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    expected = elements * (2 if reduced_as_bf16(config) else 4) * reductions_per_step(config)
    for step in engine.communication_compression.stats.steps:
        assert step.bypasses == {}
        assert step.compressed_calls == step.calls > 0
        # ZeRO 3 pads each parameter to a multiple of the number of ranks.
        assert expected <= step.bytes_in <= 1.001 * expected
        assert step.wire_bytes < step.plain_bytes


def reduced_as_bf16(config: dict) -> bool:
    return config["bf16"]["enabled"] or "communication_data_type" in config


def reductions_per_step(config: dict) -> int:
    """ZeRO 2 and 3 reduce in every micro-batch, the others once per step."""
    return ACCUMULATION if config["zero_optimization"]["stage"] >= 2 else 1
