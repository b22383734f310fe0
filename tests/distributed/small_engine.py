"""A small DeepSpeed engine, for tests that make several."""

import deepspeed
import torch
from scenarios import IMPORTS

# For ranks that make engines.
DEEPSPEED_IMPORTS = f"{IMPORTS},ncz_plugins.deepspeed,deepspeed.runtime.zero.muon.muon_optimizer"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}


def small_engine(stage: int, key, mpu=None, **top_level):
    """An engine on CPUs.

    Args:
        key: value of `communication_compression`; None: the configuration has no such key.
        top_level: further keys of the configuration.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(31, 257), torch.nn.GELU(), torch.nn.Linear(257, 7))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({} if key is None else {"communication_compression": key}),
        **top_level,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]
