"""Under every ZeRO stage, each element of a gradient is known by the parameter that it belongs to.

Error feedback shows that to the element: whatever was lost in one step is in the next ones, or in what is kept for the
parameter's element. So the sums over the steps differ from a plain run's by what is kept, and by nothing else.
"""

import csv
from collections import defaultdict

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from on_rank import BF16_ROUNDING, attempt, folder, rank, same_on_all_ranks
from scenarios import DEEPSPEED, ranks
from small_engine import INPUTS, KEY, OUTPUTS, configuration, loss_of, train, without_key

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow
on_two_ranks = ranks(2, launcher="torch", seconds=280, **DEEPSPEED)
BOUND = 3e-2  # so wide that most of a gradient is lost in its own step
ACCUMULATION = 2
STEPS = 4
WEIGHTS = {"a.weight": 257 * 31, "b.weight": 257 * 31, "head.weight": 7 * 257}
BIASES = {"a.bias": 257, "b.bias": 257, "head.bias": 7}


def case(stage: int, dtype: str = "fp32", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration in which weights never change, and biases go plain."""
    how = {
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    key = {
        "quantizer": {"mode": "abs", "value": BOUND, "error_feedback": True},
        # The second one is for nothing, as long as weights are matrices wherever they are flat.
        "policies": [
            {"name": "*.bias", "shape": "vector", "action": "skip"},
            {"shape": "vector", "quantizer": {"kind": "lossless"}},
        ],
        "transport": {"min_bytes": 0},
    }
    return configuration(stage, key, **how | top_level)


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
}


# ---------------------------------------------------------------- a model and its gradients


class Branches(torch.nn.Module):
    """Two branches, so that the order of the backward pass can differ from step to step, and one can be left out."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(INPUTS, 257)
        self.b = torch.nn.Linear(INPUTS, 257)
        self.head = torch.nn.Linear(257, OUTPUTS)
        self.order = "ab"

    def forward(self, inputs):
        return self.head(torch.nn.functional.gelu(sum(getattr(self, branch)(inputs) for branch in self.order)))


def start(config: dict):
    torch.manual_seed(0)
    model = Branches()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": weights}, {"params": biases}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def gradients(engine) -> dict[str, torch.Tensor]:
    """Of the step that ends, by name; a zero for a parameter that has none."""
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    return {name: torch.zeros((), dtype=torch.double) if g is None else g.double() for name, g in found.items()}


# ---------------------------------------------------------------- nothing is lost


def swapped(module: Branches, step: int) -> None:
    module.order = "ba" if step % 2 else "ab"


def unused_in_turns(module: Branches, step: int) -> None:
    module.order = "a" if step % 2 else "ab"


def frozen_in_turns(module: Branches, step: int) -> None:
    module.b.requires_grad_(step % 2 == 0)


def turns(stage: int) -> dict:
    return case(stage, **(PRESCALED if stage == 0 else {}))


@pytest.mark.parametrize("name", CASES)
@on_two_ranks
def test_each_element_gets_back_what_it_lost(group, name):
    loses_nothing(CASES[name], swapped)


@pytest.mark.parametrize("stage", range(4))
@on_two_ranks
def test_nothing_is_lost_of_parameters_that_are_frozen_in_turns(group, stage):
    loses_nothing(turns(stage), frozen_in_turns)


@pytest.mark.parametrize("stage", range(3))  # ZeRO 3 itself uses the gradient of the last step again
@on_two_ranks
def test_nothing_is_lost_of_parameters_that_are_unused_in_turns(group, stage):
    loses_nothing(turns(stage), unused_in_turns)


def loses_nothing(config: dict, change) -> None:
    """Fail unless gradients, added up over steps, differ from those of a plain run by what is kept, and by no more.

    Args:
        change: prepares the model for a step, given the step's number.
    """
    ours, plain = start(config), start(without_key(config))
    errors = defaultdict(float)  # of the sums over the steps so far
    exact = set(WEIGHTS) | set(BIASES)  # the parameters whose gradients were those of the plain run in each step
    largest = 0.0
    for step in range(STEPS):
        for engine in (ours, plain):
            change(engine.module, step)
            engine.backward(loss_of(engine, 2 * step))
            engine.step()  # of the first of two micro-batches
            engine.backward(loss_of(engine, 2 * step + 1))
        expected = gradients(plain)
        for name, gradient in gradients(ours).items():
            errors[name] += gradient - expected[name]
            largest = max(largest, expected[name].abs().max().item())
            if not torch.equal(gradient, expected[name]):
                exact.discard(name)
        ours.step()
        plain.step()

    # Parameters go exact where their name says so.
    assert exact == set(BIASES)
    for step in ours.communication_compression.stats.steps:
        assert set(step.bypasses) == {"policy"}
        assert step.compressed_calls + step.bypasses["policy"] == step.calls
        assert step.compressed_calls > 0

    # What the others lack is what the ranks keep for their elements. Only rounding is lost in the sum of all steps: of
    # results, which error feedback does not see, and of what it keeps.
    residuals = ours.communication_compression.training.residuals.by_name
    assert {name: residual.numel() for name, residual in residuals.items()} == WEIGHTS
    rounding = 2.0**-8 if reduced_as_bf16(config) else 2.0**-20
    allowed = (rounding * largest + 2 * BOUND * BF16_ROUNDING) * STEPS * ACCUMULATION
    for name in WEIGHTS:
        dist.all_reduce(kept := residuals[name].double())
        assert (errors[name].flatten() + kept).abs().max() <= allowed
        assert errors[name].abs().max() > max(BOUND / 2, 2 * allowed)
    ours.destroy()
    plain.destroy()


def reduced_as_bf16(config: dict) -> bool:
    return config["bf16"]["enabled"] or "communication_data_type" in config


# ---------------------------------------------------------------- steps that are skipped

SKIPPED = 2  # the step that overflows
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
AUTO = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}


def with_skip(stage: int, dtype: dict, zero: dict = SMALL) -> dict:
    """A step of this overflows; other buckets than that of the weight that does are compressed."""
    how = case(stage, zero=zero, **dtype) | {"gradient_accumulation_steps": 1}
    scale = 2**8 if "fp16" in dtype else 2**16 if "torch_autocast" in dtype else 1  # the first
    how[KEY]["quantizer"]["value"] = BOUND * scale
    return how


SKIPS = {
    "bf16 stage 1": with_skip(1, BF16),
    "bf16 stage 2": with_skip(2, BF16),
    "bf16 stage 3": with_skip(3, BF16),
    "fp16 stage 2": with_skip(2, FP16),
    "fp16 stage 3": with_skip(3, FP16),
    "autocast stage 0": with_skip(0, AUTO | PRESCALED, {}),
    "autocast stage 2": with_skip(2, AUTO),
}


def scale_of(engine) -> float:
    """What a loss scaler multiplies gradients by."""
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return scaler.get_scale() if scaler else engine.optimizer.cur_scale


def kept_by_all(engine) -> dict[str, torch.Tensor]:
    """What all ranks keep for a parameter, by its name, in the unit of gradients that are not scaled."""
    residuals = engine.communication_compression.training.residuals.by_name
    kept = {name: residual.double() / scale_of(engine) for name, residual in residuals.items()}
    for each in kept.values():
        dist.all_reduce(each)
    return kept


def unscaled_gradients(engine, step: int, overflows: bool) -> dict[str, torch.Tensor]:
    """Those of a step, which one rank's gradient of a weight makes overflow if it is to."""
    hook = None
    if overflows and rank == 1:
        hook = engine.module.a.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    engine.backward(loss_of(engine, step))
    found = {name: gradient / scale_of(engine) for name, gradient in gradients(engine).items()}
    if hook:
        hook.remove()
    engine.step()
    return found


@pytest.mark.parametrize("name", SKIPS)
@on_two_ranks
def test_what_was_kept_goes_with_the_gradients_of_a_step_that_is_skipped(group, name):
    # DeepSpeed asks the accelerator, which says no for want of fast kernels; torch computes float16 on any CPU.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    ours, plain = start(SKIPS[name]), start(without_key(SKIPS[name]))
    stats = ours.communication_compression.stats
    missing, scales, largest = defaultdict(float), [], 0.0
    for step in range(SKIPPED + 5):
        before = kept_by_all(ours)
        scales.append(scale_of(ours))
        found, expected = (unscaled_gradients(engine, step, step == SKIPPED) for engine in (ours, plain))
        if step == SKIPPED:
            # The step's other buckets are compressed. Whatever was kept goes.
            assert stats.steps[-1].bypasses["non-finite"] >= 1
            assert stats.steps[-1].compressed_calls >= 1 or name == "autocast stage 0"  # all in one bucket
            lost = before
            assert max(each.abs().max() for each in kept_by_all(ours).values()) == 0
            assert min(each.abs().max() for each in lost.values()) > BOUND / 4
            continue
        for parameter, gradient in found.items():
            missing[parameter] += gradient - expected[parameter]
            largest = max(largest, expected[parameter].abs().max().item())

    # What the sums lack is what went, and what is kept now.
    rounding = (2.0 ** (-9 if "bf16" in name else -11) * largest + 2 * BOUND * BF16_ROUNDING) * len(scales)
    assert rounding < BOUND / 4
    for parameter, kept in kept_by_all(ours).items():
        assert (missing[parameter].flatten() + kept + lost[parameter]).abs().max() <= rounding

    if name == "autocast stage 0":  # PyTorch's scaler does not tell DeepSpeed
        assert scales[SKIPPED + 1] < scales[SKIPPED]
    else:
        assert ours.skipped_steps == plain.skipped_steps == 1
    if name == "fp16 stage 2":  # what is kept follows a scale that grows and shrinks
        assert any(b > a for a, b in zip(scales, scales[1:])) and any(b < a for a, b in zip(scales, scales[1:])), scales
    ours.destroy()
    plain.destroy()


# ---------------------------------------------------------------- the monitor, and errors


@on_two_ranks
def test_the_monitor_gets_every_step(group):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder()), "job_name": "monitor"}}
    engine = start(case(2, **monitor))
    train(engine, range(STEPS * ACCUMULATION))
    steps = list(engine.communication_compression.stats.steps)
    assert len(steps) == STEPS
    for file, key in (("ncz_ratio.csv", "ratio"), ("ncz_wire_bytes.csv", "wire_bytes")) if rank == 0 else ():
        header, *rows = csv.reader((folder() / "monitor" / file).read_text().splitlines())
        assert header == ["step", key]
        assert [(int(step), float(value)) for step, value in rows] == [
            (number, pytest.approx(getattr(step, key))) for number, step in enumerate(steps, 1)
        ]


@on_two_ranks
def test_what_the_engine_knows_by_no_name_is_an_error(group):
    engine = start(case(0))
    # DeepSpeed reduces this parameter from now on, but does not know it by name.
    engine.module.late = torch.nn.Parameter(torch.ones(5))
    engine.module.head.register_forward_hook(lambda module, inputs, output: output + engine.module.late.sum())
    refused = attempt(lambda: train(engine))
    total = sum(WEIGHTS.values()) + sum(BIASES.values()) + 5
    assert refused["error"] == "UnsupportedError"
    assert refused["message"].startswith(f"5 of {total} elements that DeepSpeed reduces belong to no")
    assert "quantizer.error_feedback" in refused["message"]


@on_two_ranks
def test_an_alarm_of_the_guard_ends_the_step_on_every_rank(group):
    config = case(3)
    config[KEY]["guard"] = {"every": 1, "max_relative_error": 1e-6, "on_alarm": "stop"}
    engine = start(config)
    stopped = attempt(lambda: train(engine))
    assert stopped["error"] == "AccuracyError"
    assert stopped["message"].startswith("step 1: ") and "a.weight and 2 more" in stopped["message"]
    same_on_all_ranks(stopped["message"])
