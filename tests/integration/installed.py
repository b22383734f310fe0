"""What users do first with an installed package: a program for `torchrun --nproc-per-node 2`, without a checkout.

`make installed` runs it where the wheel of `dist/` was installed, with README.md beside it. A call of all ranks, then a
training by DeepSpeed with the import and the JSON of README.md, as they are.
"""

import json
import re
import site
from importlib import import_module
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import ncz_plugins
from ncz_plugins import kernels

ELEMENTS = 1 << 20
OWN_JSON = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}

# Else DeepSpeed compiles a library at the first start: small_engine.py has this, too.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
assert any(Path(ncz_plugins.__file__).is_relative_to(folder) for folder in site.getsitepackages()), ncz_plugins.__file__
assert kernels.cpu_backend().name != "reference", "the wheel's library was not loaded"

# All ranks get the same bits, each off by at most `ranks` times the bound: 0.375 times the root mean square of a block.
tensors = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number)) for number in range(ranks)]
total = tensors[rank].clone()
communicator = ncz_plugins.Communicator({"transport": {"min_bytes": 0}})
communicator.all_reduce(total, async_op=True).wait()
largest = max(x.view(-1, 128).square().mean(1).sqrt().max() for x in tensors)
assert (total - sum(tensors)).abs().max() <= ranks * 0.375 * largest
assert (found := communicator.stats.total.wire_bytes) < 4 * ELEMENTS, found
communicator.close()
others = [torch.empty_like(total) for _ in range(ranks)]
dist.all_gather(others, total)
assert all(torch.equal(total, other) for other in others)

# DeepSpeed, as README.md has it.
[(module, added)] = re.findall(
    r"^\*\*DeepSpeed\*\* takes one import, `import ([\w.]+)`.*?^```json\n(.*?)^```",
    Path("README.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
import_module(module)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN_JSON | json.loads(added))
x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
losses = []
for _ in range(10):
    loss = (engine(x) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert engine.communication_compression.stats.total.compressed_calls, engine.communication_compression.stats
if rank == 0:
    print(f"ok: {ncz_plugins.__version__}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}")
engine.destroy()
dist.destroy_process_group()
