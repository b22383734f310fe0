"""The last rank dies between two steps of DistributedDataParallel: what the others hear, and how soon."""

import os
import time

import torch
import torch.distributed as dist
from common import leave, start
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import NczError
from ncz_plugins.torch import ddp

rank, world_size = start()
model = DistributedDataParallel(torch.nn.Linear(997, 1009))
ddp.compress(model, {"transport": {"timeout_seconds": 20}})


def step() -> None:
    model(torch.randn(4, 997)).sum().backward()


for _ in range(2):  # in the second one DDP itself says something over its group
    step()
dist.barrier()
if rank == world_size - 1:
    leave({})
    os._exit(3)
errors = []
started = time.monotonic()
for _ in range(2):
    try:
        step()
    except (RuntimeError, NczError) as error:
        errors.append([type(error).__name__, str(error)])
leave({"errors": errors, "seconds": time.monotonic() - started})
os._exit(0)  # gloo may abort if its peer is gone
