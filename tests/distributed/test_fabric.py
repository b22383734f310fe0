"""`ddp.compress` and `fsdp.compress` take the models of Lightning Fabric: DDP, compiled DDP, and FSDP2."""

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from scenarios import IMPORTS, on_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard

from ncz_plugins.torch import ddp, fsdp

KINDS = ["ddp", "compiled ddp"] + ["fsdp"] * hasattr(FSDPModule, "set_custom_reduce_scatter")  # from torch 2.9 on
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
LOSSLESS = {"quantizer": {"kind": "lossless"}, "transport": {"min_bytes": 0}}


def trained(fabric, compress, module):
    """The parameters after three steps, compressed by `compress`, or plain if it is None."""
    model = fabric.setup_module(copy.deepcopy(module))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    compression = compress and compress(model, LOSSLESS)
    generator = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(8, 256, generator=generator)).square().mean())
        optimizer.step()
    if compression:
        assert compression.stats.total.compressed_calls
        compression.close()
    return [getattr(each, "to_local", lambda each=each: each)().clone() for each in model.parameters()]


def sharded(module, mesh):
    return fully_shard(module, mesh=mesh["data_parallel"])


def train_plain_and_compressed() -> dict[str, bool]:
    """Whether the parameters are the same to the bit, for each kind of model."""
    # Here, as every process of tests would spend a second on it to collect them.
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # from which Lightning derives the rank
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    replicated = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    shards = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
    sharding = Fabric(accelerator="cpu", devices=2, strategy=shards)
    for fabric in (replicated, sharding):
        fabric.launch()
    trials = {
        "ddp": (replicated, ddp.compress, module),
        "compiled ddp": (replicated, ddp.compress, torch.compile(module, backend="eager")),
        "fsdp": (sharding, fsdp.compress, module),
    }
    same = {}
    for name in KINDS:
        fabric, compress, start = trials[name]
        plain, ours = trained(fabric, None, start), trained(fabric, compress, start)
        same[name] = all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
    torch.distributed.barrier()
    return same


def test_models_of_fabric_train_to_the_same_bits_without_loss(tmp_path):
    for same in on_ranks(2, train_plain_and_compressed, tmp_path, imports=f"{IMPORTS},lightning"):
        assert same == dict.fromkeys(KINDS, True)
