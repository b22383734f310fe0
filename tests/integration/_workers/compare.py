"""Trains each DeepSpeed configuration of a JSON file twice, side by side: as it stands, and without our key.

usage: compare.py CASES.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import finish, loss_of, parameters_sha256, save, start
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

import ncz_plugins.deepspeed  # noqa: F401

KEY = "communication_compression"
STEPS = 4


def compare(config: dict) -> dict:
    # Both engines live at the same time: one's compression must not leak into the other.
    compressed = start(config)
    plain = start({key: value for key, value in config.items() if key != KEY})
    accumulation = config.get("gradient_accumulation_steps", 1)
    result = {"plain_is_off": plain.communication_compression is None, "losses": [], "plain_losses": []}
    for batch in range(STEPS * accumulation):
        for engine, losses in ((compressed, "losses"), (plain, "plain_losses")):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            result[losses].append(loss.item())
        if batch == accumulation - 1:  # the only step that both take from the same weights
            result |= compare_gradients(compressed, plain)
        compressed.step()
        plain.step()
    result |= {
        "weights": compare_weights(compressed),
        "sha256": parameters_sha256(compressed),
        "stats": compressed.communication_compression.stats.to_dict(),
    }
    for engine in (compressed, plain):
        engine.destroy()
    compressed.communication_compression.close()
    return result


def compare_gradients(compressed, plain) -> dict:
    """The number of gradients, their largest difference, and the largest of their magnitudes."""
    pairs = [
        (safe_get_full_grad(a).float(), safe_get_full_grad(b).float())
        for a, b in zip(compressed.module.parameters(), plain.module.parameters())
    ]
    return {
        "gradients": sum(b.numel() for _, b in pairs),
        "gradient_error": max((a - b).abs().max().item() for a, b in pairs),
        "gradient_largest": max(b.abs().max().item() for _, b in pairs),
    }


def compare_weights(engine) -> list[bool]:
    """Whether `safe_get_full_fp32_param` gives what the model holds, for each parameter that it knows."""
    parameters = list(engine.module.parameters())
    with zero.GatheredParameters(parameters):
        masters = [safe_get_full_fp32_param(p) for p in parameters]
        return [torch.equal(m.to(p.dtype), p) for m, p in zip(masters, parameters) if m is not None]


cases = json.loads(Path(sys.argv[-1]).read_text())
results = {}
for name, config in cases.items():
    results[name] = compare(config)
    if dist.get_rank() == 0:
        print(f"done: {name}", flush=True)
save(results)
finish()
