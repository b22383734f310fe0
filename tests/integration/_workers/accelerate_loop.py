"""A training loop of Accelerate, whose DeepSpeedPlugin has our key."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from common import BATCH, INPUTS, OUTPUTS, finish, parameters_sha256, save

import ncz_plugins.deepspeed  # noqa: F401

STEPS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "communication_compression": {"transport": {"min_bytes": 0}},
}

PartialState(cpu=True)  # as the Trainer does: without it, Accelerate runs DeepSpeed on GPUs only
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 257), torch.nn.GELU(), torch.nn.Linear(257, OUTPUTS))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(STEPS * BATCH * accelerator.num_processes, INPUTS)
loader = torch.utils.data.DataLoader(inputs, batch_size=BATCH)
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for batch in loader:
    with accelerator.accumulate(engine):
        accelerator.backward(engine(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    steps += 1
total = engine.communication_compression.stats.total.to_dict()
save({"steps": steps, "total": total, "sha256": parameters_sha256(engine)})
finish()
