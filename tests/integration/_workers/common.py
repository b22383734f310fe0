"""What the workers share. It does not import ncz_plugins: that is for each worker to do, or not to do."""

import hashlib
import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

# At start-up DeepSpeed would compile a shared-memory all-reduce for CPUs, which takes more than a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

INPUTS, OUTPUTS, BATCH = 31, 7, 4


def start(config: dict | str):
    """A DeepSpeed engine around a small model, whose initial weights are always the same."""
    torch.manual_seed(0)
    # Odd sizes: parameters that can't be split evenly among ranks.
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 257),
        torch.nn.GELU(),
        torch.nn.Linear(257, 129),
        torch.nn.GELU(),
        torch.nn.Linear(129, OUTPUTS),
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def loss_of(engine, number: int) -> torch.Tensor:
    """The loss on this rank's own batch of that number."""
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    inputs = torch.randn(BATCH, INPUTS, generator=random, dtype=torch.float32).to(engine.device)
    targets = torch.randn(BATCH, OUTPUTS, generator=random, dtype=torch.float32).to(engine.device)
    dtype = next(engine.module.parameters()).dtype
    return torch.nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)


def parameters_sha256(engine) -> str:
    """A hash of all parameters, which ZeRO 3 collects from all ranks."""
    digest = hashlib.sha256()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for parameter in parameters:
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def save(result: dict) -> None:
    """Hand this rank's result to the test."""
    Path(os.environ["NCZ_TEST_RESULTS"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def finish() -> None:
    """End together: a rank that leaves early can abort the others."""
    dist.barrier()
    dist.destroy_process_group()
