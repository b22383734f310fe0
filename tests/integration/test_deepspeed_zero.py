"""Compressed gradients under every ZeRO stage, beside a plain run in the same processes."""

import json

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

BOUND = 2e-4  # of each rank's contribution to each reduction, in the gradients' own unit
ACCUMULATION = 2
BF16_ROUNDING = 2.0**-7  # two roundings of half a unit in the last place, as a share of the value


def case(stage: int, dtype: str = "fp32", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration in which every gradient, however small, is compressed."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "communication_compression": {
            "quantizer": {"mode": "abs", "value": BOUND},
            "transport": {"min_bytes": 0},
        },
        **top_level,
    }


ALL_REDUCE = {"reduce_scatter": False}
EIGHT_BITS = {"quantizer": {"mode": "bits", "value": 8}, "transport": {"min_bytes": 0}}
CASES = {
    **{f"{dtype} stage {stage}": case(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")},
    **{f"fp32 stage {stage} without reduce_scatter": case(stage, zero=ALL_REDUCE) for stage in (1, 2, 3)},
    "bf16 stage 3 without reduce_scatter": case(3, "bf16", zero=ALL_REDUCE),
    **{f"fp32 stage {stage} overlapping": case(stage, zero={"overlap_comm": True}) for stage in (1, 2, 3)},
    "fp32 stage 2 overlapping without reduce_scatter": case(2, zero={**ALL_REDUCE, "overlap_comm": True}),
    "fp32 stage 2 in small buckets": case(2, zero={"reduce_bucket_size": 10_000}),
    "fp32 stage 3 in small buckets": case(3, zero={"reduce_bucket_size": 10_000}),
    "fp32 stage 0 prescaled": case(0, prescale_gradients=True),
    "fp32 stage 1 sent as bf16": case(1, communication_data_type="bf16"),
    "fp32 stage 3 sent as bf16": case(3, communication_data_type="bf16"),
    "fp32 stage 2 at a fixed rate": case(2, zero={"overlap_comm": True}, communication_compression=EIGHT_BITS),
    "bf16 stage 3 at a fixed rate": case(3, "bf16", communication_compression=EIGHT_BITS),
    "bf16 stage 1 accumulating in fp32": case(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
}
THREE_RANKS = ["fp32 stage 2", "bf16 stage 3"]  # an odd number: parts are padded


def run(folder, names, ranks: int) -> list[dict]:
    cases = folder / "cases.json"
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    outcome = launch(deepspeed_ranks(WORKERS / "compare.py", cases, ranks=ranks), folder, timeout=240)
    assert len(outcome.ranks) == ranks
    return outcome.ranks


@pytest.fixture(
    params=[*((name, 2) for name in CASES), *((name, 3) for name in THREE_RANKS)],
    ids=lambda param: f"{param[0]}-{param[1]}ranks",
)
def compared(request):
    """(the configuration, what every rank found)"""
    name, ranks = request.param
    results = request.getfixturevalue("two_ranks" if ranks == 2 else "three_ranks")
    return CASES[name], [rank[name] for rank in results]


def reduced_as_bf16(config: dict) -> bool:
    return config["bf16"]["enabled"] or "communication_data_type" in config


def reductions_per_step(config: dict) -> int:
    """ZeRO 2 and 3 reduce in every micro-batch, the others once per step."""
    return ACCUMULATION if config["zero_optimization"]["stage"] >= 2 else 1


def test_every_gradient_is_compressed(compared):
    config, ranks = compared
    for rank in ranks:
        for step in rank["stats"]["steps"]:
            assert step["bypasses"] == {}
            assert step["compressed_calls"] == step["calls"] > 0
            expected = rank["gradients"] * (2 if reduced_as_bf16(config) else 4) * reductions_per_step(config)
            # ZeRO 3 pads each parameter to a multiple of the number of ranks.
            assert expected <= step["bytes_in"] <= 1.001 * expected
            assert step["wire_bytes"] < step["plain_bytes"]


def test_gradients_stay_within_the_bound(compared):
    config, ranks = compared
    for rank in ranks:
        bound = len(ranks) * BOUND
        if config["communication_compression"] == EIGHT_BITS:
            # Half a step of each rank, whose gradients before the average may be a few times as large.
            bound = 4 * rank["gradient_largest"] / (2 * 127)
        if reduced_as_bf16(config):
            bound += BF16_ROUNDING * rank["gradient_largest"]
        bound *= reductions_per_step(config)
        slack = 1e-6 * rank["gradient_largest"]  # of float32 in the plain run
        assert 0 < rank["gradient_error"] <= bound + slack


def test_the_loss_follows_the_plain_run(compared):
    _, ranks = compared
    for rank in ranks:
        assert rank["losses"][:ACCUMULATION] == rank["plain_losses"][:ACCUMULATION]  # before the first update
        assert rank["losses"] == pytest.approx(rank["plain_losses"], rel=0.01)
        assert rank["losses"] != rank["plain_losses"]


def test_replicas_are_identical(compared):
    _, ranks = compared
    assert len({rank["sha256"] for rank in ranks}) == 1


def test_full_weights_are_exact(compared):
    config, ranks = compared
    for rank in ranks:
        assert all(rank["weights"])
        # Without ZeRO there are no partitions that DeepSpeed would have to put together.
        assert len(rank["weights"]) == 6 or config["zero_optimization"]["stage"] == 0


def test_another_engine_stays_plain(compared):
    _, ranks = compared
    assert all(rank["plain_is_off"] for rank in ranks)
