"""Error feedback and a policy by name under each DeepSpeed configuration of a JSON file, beside a plain run.

usage: feedback.py CASES.json
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


class Branches(torch.nn.Module):
    """Two branches, so that the order of the backward pass can differ from step to step."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(INPUTS, 257)
        self.b = torch.nn.Linear(INPUTS, 257)
        self.head = torch.nn.Linear(257, OUTPUTS)
        self.swapped = False

    def forward(self, inputs):
        branches = (self.b, self.a) if self.swapped else (self.a, self.b)
        first, second = (branch(inputs) for branch in branches)
        return self.head(torch.nn.functional.gelu(first + second))


def start(config: dict):
    torch.manual_seed(0)
    model = Branches()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": weights}, {"params": biases}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def gradients(engine) -> dict[str, torch.Tensor]:
    """Of the step that ends, by name."""
    return {name: safe_get_full_grad(p).double() for name, p in engine.module.named_parameters()}


def attribute(config: dict) -> dict:
    compressed = start(config)
    plain = start({key: value for key, value in config.items() if key != KEY})
    errors = {name: 0.0 for name, _ in compressed.module.named_parameters()}  # of the sums over the steps so far
    result = {"largest": 0.0, "exact_in_each_step": {name: True for name in errors}}
    for step in range(STEPS):
        for engine in (compressed, plain):
            engine.module.swapped = bool(step % 2)
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
    else:
        results[name] = attribute(config)
    if dist.get_rank() == 0:
        print(f"done: {name}", flush=True)
save(results)
finish()
