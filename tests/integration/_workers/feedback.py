"""Error feedback and a policy by name under each DeepSpeed configuration of a JSON file, beside a plain run.

usage: feedback.py CASES.json

The name of a case says what else happens in it: see the end of this file.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import INPUTS, OUTPUTS, finish, loss_of, parameters_sha256, save
from deepspeed.utils import safe_get_full_grad

import ncz_plugins.deepspeed  # noqa: F401

KEY = "communication_compression"
STEPS = 4
SKIPPED = 2  # the step that overflows, of those in which one does


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
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def gradients(engine) -> dict[str, torch.Tensor]:
    """Of the step that ends, by name; a zero for a parameter that has none."""
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    return {name: torch.zeros((), dtype=torch.double) if g is None else g.double() for name, g in found.items()}


def swapped(module: Branches, step: int) -> None:
    module.order = "ba" if step % 2 else "ab"


def unused_in_turns(module: Branches, step: int) -> None:
    module.order = "a" if step % 2 else "ab"


def frozen_in_turns(module: Branches, step: int) -> None:
    module.b.requires_grad_(step % 2 == 0)


def attribute(config: dict, change=swapped) -> dict:
    compressed = start(config)
    plain = start({key: value for key, value in config.items() if key != KEY})
    errors = {name: 0.0 for name, _ in compressed.module.named_parameters()}  # of the sums over the steps so far
    result = {"largest": 0.0, "exact_in_each_step": {name: True for name in errors}}
    for step in range(STEPS):
        for engine in (compressed, plain):
            change(engine.module, step)
            engine.backward(loss_of(engine, 2 * step))
            engine.step()  # of the first of two micro-batches
            engine.backward(loss_of(engine, 2 * step + 1))
        exact = gradients(plain)
        for name, gradient in gradients(compressed).items():
            errors[name] += gradient - exact[name]
            result["exact_in_each_step"][name] &= torch.equal(gradient, exact[name])
            result["largest"] = max(result["largest"], exact[name].abs().max().item())
        compressed.step()
        plain.step()

    compression = compressed.communication_compression
    residuals = compression.training.residuals.by_name
    result["residuals"] = {name: residual.numel() for name, residual in residuals.items()}
    result["error"] = {name: error.abs().max().item() for name, error in errors.items()}
    result["unexplained"] = {}
    for name, residual in residuals.items():
        total = residual.double()
        dist.all_reduce(total)
        result["unexplained"][name] = (errors[name].flatten() + total).abs().max().item()
    result |= {"sha256": parameters_sha256(compressed), "stats": compression.stats.to_dict()}
    for engine in (compressed, plain):
        engine.destroy()
    return result


def scale_of(engine) -> float:
    """What a loss scaler multiplies gradients by."""
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return scaler.get_scale() if scaler else engine.optimizer.cur_scale


def skip(config: dict) -> dict:
    """One rank's gradient of a weight overflows in a step, which is skipped. Other buckets of it are compressed."""
    # DeepSpeed asks the accelerator, which says no for want of fast kernels; torch computes float16 on any CPU.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    engines = [start(config), start({key: value for key, value in config.items() if key != KEY})]
    residuals = engines[0].communication_compression.training.residuals.by_name
    applied, lost, scales, rounding = {}, {}, [], 0.0

    def kept() -> dict[str, torch.Tensor]:
        total = {name: residual.double() / scale_of(engines[0]) for name, residual in residuals.items()}
        for each in total.values():
            dist.all_reduce(each)
        return total

    for step in range(SKIPPED + 5):
        before, found = kept(), []
        scales.append(scale_of(engines[0]))
        for engine in engines:
            hook = None
            if step == SKIPPED and dist.get_rank() == 1:
                hook = engine.module.a.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
            engine.backward(loss_of(engine, step))
            found.append({name: each / scale_of(engine) for name, each in gradients(engine).items()})
            if hook:
                hook.remove()
            engine.step()
        if step == SKIPPED:
            lost, left = before, kept()
            counted = engines[0].communication_compression.stats.steps[-1]
            continue
        for name, gradient in found[0].items():
            applied[name] = applied.get(name, 0) + gradient - found[1][name]
            rounding = max(rounding, found[1][name].abs().max().item())
    now = kept()
    for engine in engines:
        engine.destroy()
    return {
        "skipped": [engine.skipped_steps for engine in engines],
        "bypasses": counted.bypasses,
        "compressed": counted.compressed_calls,
        "scales": scales,
        "left": max(each.abs().max().item() for each in left.values()),
        "lost": {name: each.abs().max().item() for name, each in lost.items()},
        "largest": rounding,
        "unexplained": {
            name: (applied[name].flatten() + now[name] + lost[name]).abs().max().item() for name in residuals
        },
    }


def late_parameter(engine) -> None:
    """Add what DeepSpeed reduces from then on, but does not know by name."""
    engine.module.late = torch.nn.Parameter(torch.ones(5))
    engine.module.head.register_forward_hook(lambda module, inputs, output: output + engine.module.late.sum())


def error_in_first_step(config: dict, prepare=lambda engine: None) -> str:
    engine = start(config)
    prepare(engine)
    try:
        for batch in range(2):
            engine.backward(loss_of(engine, batch))
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


results = {}
for name, config in json.loads(Path(sys.argv[-1]).read_text()).items():
    if name == "late parameter":
        results[name] = error_in_first_step(config, late_parameter)
    elif name == "alarm":
        results[name] = error_in_first_step(config)
    elif name.startswith("skipped"):
        results[name] = skip(config)
    elif name.startswith("unused in turns"):
        results[name] = attribute(config, unused_in_turns)
    elif name.startswith("frozen in turns"):
        results[name] = attribute(config, frozen_in_turns)
    else:
        results[name] = attribute(config)
    if dist.get_rank() == 0:
        print(f"done: {name}", flush=True)
save(results)
finish()
