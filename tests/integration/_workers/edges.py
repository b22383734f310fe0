"""Cases that need more than a configuration: non-finite gradients, `no_sync`, and collectives of the user's own."""

import deepspeed
import torch
import torch.distributed as dist
from common import finish, loss_of, parameters_sha256, save, start
from deepspeed.utils import safe_get_full_grad

import ncz_plugins.deepspeed  # noqa: F401

KEY = "communication_compression"
POISONED_RANK = 1
POISONED = ((3, 5), float("nan")), ((100, 7), float("inf"))  # places in the first weight, and what is put there


def config(stage: int, **top_level) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        KEY: {"transport": {"min_bytes": 0}},
        **top_level,
    }


def without_key(config: dict) -> dict:
    return {key: value for key, value in config.items() if key != KEY}


def train_poisoned(config: dict) -> dict:
    """Four steps, in the first of which one rank's gradient of the first weight has values that are not finite."""
    engine = start(config)

    def poison(gradient):
        gradient = gradient.clone()
        for place, value in POISONED:
            gradient[place] = value
        return gradient

    losses = []
    for step in range(4):
        hook = None
        if step == 0 and dist.get_rank() == POISONED_RANK:
            hook = engine.module[0].weight.register_hook(poison)
        loss = loss_of(engine, step)
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = [safe_get_full_grad(p).clone() for p in engine.module.parameters()]
        if hook:
            hook.remove()
        engine.step()
    compression = engine.communication_compression
    result = {
        "losses": losses,
        "skipped": engine.skipped_steps,
        "sha256": parameters_sha256(engine),
        "steps": [step.to_dict() for step in compression.stats.steps] if compression else None,
    }
    return result, gradients


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


def compare_poisoned(config: dict) -> dict:
    compressed, gradients = train_poisoned(config)
    plain, plain_gradients = train_poisoned(without_key(config))
    places = {(0, *place.tolist()) for place in (~gradients[0].isfinite()).nonzero()}
    for i, gradient in enumerate(gradients[1:], 1):
        places |= {(i, *place.tolist()) for place in (~gradient.isfinite()).nonzero()}
    return {
        "compressed": compressed,
        "plain": plain,
        "not_finite": sorted(places),
        "expected_not_finite": sorted((0, *place) for place, _ in POISONED),
        "gradients_as_plain": [same_bits(a, b) for a, b in zip(gradients, plain_gradients)],
    }


def own_collective() -> dict:
    """A large float all-reduce by the user, while an engine compresses."""
    engine = start(config(2))
    loss = loss_of(engine, 0)
    engine.backward(loss)
    calls = engine.communication_compression.stats.total.calls
    n = dist.get_world_size()
    everyone = [torch.randn(1 << 18, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    tensor = everyone[dist.get_rank()].clone()
    deepspeed.comm.all_reduce(tensor)
    return {
        "exact": torch.equal(tensor, torch.stack(everyone).sum(0)),
        "calls_before": calls,
        "calls_after": engine.communication_compression.stats.total.calls,
    }


def accumulate_without_sync(stage: int) -> dict:
    """Two micro-batches, only the second of which reduces."""
    engine = start(config(stage))
    calls = []
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        calls.append(engine.communication_compression.stats.total.calls)
    engine.backward(loss_of(engine, 1))
    engine.step()
    step = engine.communication_compression.stats.steps[-1]
    calls.append(step.calls)
    return {"calls": calls, "compressed_calls": step.compressed_calls, "sha256": parameters_sha256(engine)}


def evaluate_without_optimizer() -> dict:
    """Forward passes under ZeRO 3 of an engine that does not train, with its weights compressed and without."""
    settings = config(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    del settings["optimizer"]
    settings[KEY]["roles"] = ["gradient", "parameter"]
    losses = []
    for each in (settings, without_key(settings)):
        engine = start(each)
        with torch.no_grad():
            losses.append([loss_of(engine, number).item() for number in range(2)])
        if each is settings:
            total = engine.communication_compression.stats.total
            gathered = total.plain_bytes_by_role.get("parameter", 0), total.wire_bytes_by_role.get("parameter", 0)
    return {"losses": losses, "gathered": gathered}


def trained_under(dtype: torch.dtype, stage: int) -> str:
    """The weights after three steps that a program takes whose default dtype is `dtype`, once it has its engine."""
    settings = config(stage)
    settings[KEY]["quantizer"] = {"error_feedback": True}
    engine = start(settings)
    torch.set_default_dtype(dtype)
    try:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            engine.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.communication_compression.stats.total.compressed_calls
    return parameters_sha256(engine)


def other_defaults() -> dict:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return {f"stage {stage}": [trained_under(dtype, stage) for dtype in dtypes] for stage in (2, 3)}


save(
    {
        "fp32": compare_poisoned(config(2)),
        "bf16 stage 2": compare_poisoned(config(2, bf16={"enabled": True, "check_grad_overflow": True})),
        "bf16 stage 3": compare_poisoned(config(3, bf16={"enabled": True, "check_grad_overflow": True})),
        "own collective": own_collective(),
        "no_sync": accumulate_without_sync(stage=1),
        "other defaults": other_defaults(),
        "without optimizer": evaluate_without_optimizer(),
    }
)
finish()
