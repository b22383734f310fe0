"""Under every ZeRO stage, each element of a gradient is known by the parameter that it belongs to.

Error feedback shows that to the element: whatever was lost in one step is in the next ones, or in what is kept for the
parameter's element. So the sums over the steps differ from a plain run's by what is kept, and by nothing else.
"""

import csv
import json

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

BOUND = 3e-2  # so wide that most of a gradient is lost in its own step
ACCUMULATION = 2
STEPS = 4
WEIGHTS = {"a.weight": 257 * 31, "b.weight": 257 * 31, "head.weight": 7 * 257}
BIASES = {"a.bias": 257, "b.bias": 257, "head.bias": 7}


def case(stage: int, dtype: str = "fp32", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration in which weights never change, and biases go plain."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "communication_compression": {
            "quantizer": {"mode": "abs", "value": BOUND, "error_feedback": True},
            "policies": [{"name": "*.bias", "action": "skip"}],
            "transport": {"min_bytes": 0},
        },
        **top_level,
    }


SMALL = {"reduce_bucket_size": 10_000}  # one large weight and some more
TINY = {"reduce_bucket_size": 5_000}  # less than a large weight
APART = {"contiguous_gradients": False}
OVERLAPPING = {"overlap_comm": True}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# Where DeepSpeed would divide by the number of ranks after a sum: so that what is kept has the gradients' own unit.
PRESCALED = {"prescale_gradients": True}
CASES = {
    "fp32 stage 0": case(0, **PRESCALED),
    "bf16 stage 0": case(0, "bf16", **PRESCALED),
    "fp32 stage 1": case(1),
    "bf16 stage 1 accumulating in fp32": case(1, "bf16", **IN_FP32, **PRESCALED),
    "fp32 stage 1 apart, overlapping": case(1, zero=APART | OVERLAPPING),
    "fp32 stage 2": case(2),
    "bf16 stage 2 accumulating in fp32": case(2, "bf16", **IN_FP32),
    "fp32 stage 2 without reduce_scatter": case(2, zero={"reduce_scatter": False}, **PRESCALED),
    "fp32 stage 2 in small buckets, overlapping": case(2, zero=SMALL | OVERLAPPING),
    "fp32 stage 2 in small buckets, apart": case(2, zero=SMALL | APART),
    "fp32 stage 2 in tiny buckets": case(2, zero=TINY),
    "fp32 stage 3": case(3),
    "bf16 stage 3": case(3, "bf16"),
    "fp32 stage 3 sent as bf16": case(3, communication_data_type="bf16"),
    "fp32 stage 3 without reduce_scatter": case(3, zero={"reduce_scatter": False}),
    "fp32 stage 3 in small buckets, overlapping": case(3, zero=SMALL | OVERLAPPING),
    "fp32 stage 3 in tiny buckets, apart": case(3, zero=TINY | APART),
    "frozen in turns, stage 0": case(0, **PRESCALED),
    "frozen in turns, stage 1": case(1),
    "frozen in turns, stage 2": case(2),
    "frozen in turns, stage 3": case(3),
    "unused in turns, stage 0": case(0, **PRESCALED),
    "unused in turns, stage 1": case(1),
    "unused in turns, stage 2": case(2),  # ZeRO 3 itself uses the gradient of the last step again
}


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
AUTO = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}


def with_skip(stage: int, dtype: dict, zero: dict = SMALL) -> dict:
    """A step of this overflows; other buckets than that of the weight that does are compressed."""
    how = case(stage, zero=zero, **dtype) | {"gradient_accumulation_steps": 1}
    scale = 2**8 if "fp16" in dtype else 2**16 if "torch_autocast" in dtype else 1  # the first
    how["communication_compression"]["quantizer"]["value"] = BOUND * scale
    return how


SKIPS = {
    "skipped, bf16 stage 1": with_skip(1, BF16),
    "skipped, bf16 stage 2": with_skip(2, BF16),
    "skipped, bf16 stage 3": with_skip(3, BF16),
    "skipped, fp16 stage 2": with_skip(2, FP16),
    "skipped, fp16 stage 3": with_skip(3, FP16),
    "skipped, autocast stage 0": with_skip(0, AUTO | PRESCALED, {}),
    "skipped, autocast stage 2": with_skip(2, AUTO),
}


def reduced_as_bf16(config: dict) -> bool:
    return config["bf16"]["enabled"] or "communication_data_type" in config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("feedback")


@pytest.fixture(scope="module")
def ranks(folder):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "monitor"}}
    alarm = case(3)
    alarm["communication_compression"]["guard"] = {"every": 1, "max_relative_error": 1e-6, "on_alarm": "stop"}
    cases = {**CASES, **SKIPS, "late parameter": case(0), "alarm": alarm, "fp32 stage 2": case(2, **monitor)}
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    ranks = launch(deepspeed_ranks(WORKERS / "feedback.py", file), folder, timeout=240).ranks
    assert len(ranks) == 2
    return ranks


@pytest.mark.parametrize("name", CASES)
class TestEachElement:
    def test_is_kept_by_its_parameter(self, name, ranks):
        for rank in ranks:
            assert rank[name]["residuals"] == WEIGHTS

    def test_gets_back_what_it_lost(self, name, ranks):
        for rank in ranks:
            # Nothing but rounding, which error feedback does not see, is lost in the sum of all steps.
            rounding = 2.0**-8 if reduced_as_bf16(CASES[name]) else 2.0**-20
            allowed = rounding * rank[name]["largest"] * STEPS * ACCUMULATION
            for parameter in WEIGHTS:
                assert rank[name]["unexplained"][parameter] <= allowed
                assert rank[name]["error"][parameter] > max(BOUND / 2, 2 * allowed)

    def test_goes_exact_where_its_name_says_so(self, name, ranks):
        for rank in ranks:
            exact = rank[name]["exact_in_each_step"]
            assert {parameter for parameter in exact if exact[parameter]} == set(BIASES)
            for step in rank[name]["stats"]["steps"]:
                assert set(step["bypasses"]) == {"policy"}
                assert step["compressed_calls"] + step["bypasses"]["policy"] == step["calls"]
                assert step["compressed_calls"] > 0


@pytest.mark.parametrize("name", SKIPS)
def test_what_was_kept_goes_with_the_gradients_of_a_step_that_is_skipped(name, ranks):
    for rank in ranks:
        found = rank[name]
        assert found["bypasses"]["non-finite"] >= 1
        if name == "skipped, autocast stage 0":  # all in one bucket, and PyTorch's scaler does not tell DeepSpeed
            assert found["scales"][3] < found["scales"][2]
        else:
            assert found["skipped"] == [1, 1] and found["compressed"] >= 1
        assert found["left"] == 0
        assert min(found["lost"].values()) > BOUND / 4
        rounding = 2.0 ** (-9 if "bf16" in name else -11) * found["largest"] * len(found["scales"])
        assert max(found["unexplained"].values()) <= rounding < BOUND / 4


def test_what_is_kept_follows_the_loss_scale(ranks):
    for rank in ranks:
        scales = rank["skipped, fp16 stage 2"]["scales"]
        assert any(b > a for a, b in zip(scales, scales[1:])) and any(b < a for a, b in zip(scales, scales[1:])), scales


def test_what_the_engine_knows_by_no_name_is_an_error(ranks):
    for rank in ranks:
        error = rank["late parameter"]
        total = sum(WEIGHTS.values()) + sum(BIASES.values()) + 5
        assert error.startswith(f"UnsupportedError: 5 of {total} elements that DeepSpeed reduces belong to no")
        assert "quantizer.error_feedback" in error


def test_an_alarm_of_the_guard_ends_the_step_on_every_rank(ranks):
    first, second = (rank["alarm"] for rank in ranks)
    assert first.startswith("AccuracyError: step 1: ") and "a.weight and 2 more" in first
    assert second == first


def test_the_monitor_gets_every_step(folder, ranks):
    steps = ranks[0]["fp32 stage 2"]["stats"]["steps"]
    for file, key in (("ncz_ratio.csv", "ratio"), ("ncz_wire_bytes.csv", "wire_bytes")):
        header, *rows = csv.reader((folder / "monitor" / file).read_text().splitlines())
        assert header == ["step", key]
        assert [(int(step), float(value)) for step, value in rows] == [
            (number, pytest.approx(step[key])) for number, step in enumerate(steps, 1)
        ]
