"""A small model under DeepSpeed. Imports nothing of ncz_plugins: a user's script does not either."""

import hashlib

import deepspeed
import torch
import torch.distributed as dist

# At start-up DeepSpeed would compile a shared-memory all-reduce for CPUs, which takes more than a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

KEY = "communication_compression"
INPUTS, OUTPUTS, BATCH = 31, 7, 4


def configuration(stage: int, key: dict | str | None, **top_level) -> dict:
    """A configuration of DeepSpeed.

    Args:
        key: value of `communication_compression`; None: the configuration has no such key.
        top_level: further keys, and others in place of those here.
    """
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({} if key is None else {KEY: key}),
        **top_level,
    }


def without_key(config: dict) -> dict:
    return {name: value for name, value in config.items() if name != KEY}


def engine_of(config: dict | str, mpu=None):
    """An engine around a model whose first weights are always the same."""
    torch.manual_seed(0)
    # Odd sizes: parameters that can't be split evenly among ranks.
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 257),
        torch.nn.GELU(),
        torch.nn.Linear(257, 129),
        torch.nn.GELU(),
        torch.nn.Linear(129, OUTPUTS),
    )
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]


def loss_of(engine, number: int) -> torch.Tensor:
    """The loss on this rank's own batch of that number."""
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    inputs = torch.randn(BATCH, INPUTS, generator=random, dtype=torch.float32).to(engine.device)
    targets = torch.randn(BATCH, OUTPUTS, generator=random, dtype=torch.float32).to(engine.device)
    dtype = next(engine.module.parameters()).dtype
    return torch.nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)


def train(engine, numbers: range = range(2)) -> None:
    """A step on each batch of these numbers."""
    for number in numbers:
        engine.backward(loss_of(engine, number))
        engine.step()


def parameters_sha256(engine) -> str:
    """A hash of all parameters, which ZeRO 3 collects from all ranks."""
    digest = hashlib.sha256()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for parameter in parameters:
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
