"""A run that saves its state in the middle by each way that the guides show, and new processes that go on from each.

usage: checkpoints.py save|resume FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import digest, finish, start
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import Communicator
from ncz_plugins.torch import ddp, fsdp

job, folder = sys.argv[1], Path(sys.argv[2])
rank, world_size = start()
STEPS, STOP = 6, 3
WAYS = ["torch.save", "dcp.save", "dcp.async_save"]
CONFIG = {  # every step after STOP depends on what must be restored
    "quantizer": {"kind": "stochastic", "value": 1.0, "error_feedback": True},
    "transport": {"min_bytes": 0},
    "policies": [{"name": "2.*", "quantizer": {"value": 0.1}}],
    "steps": {"warmup": 1, "bounds": [{"step": 0, "times": 0.5}, {"step": 4, "times": 2}]},
    "guard": {"every": 2, "max_relative_error": 1e-6, "on_alarm": "tighten"},
}


class Run:
    """A model whose gradients are reduced call by call."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = self.wrapped(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 7)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.compression = self.compressed()

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def compressed(self):
        """What has the state."""
        self.communicator = Communicator(CONFIG)
        return self.communicator.training

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.communicator.all_reduce(parameter.grad, dist.ReduceOp.AVG, role="gradient", name=name)
        self.communicator.end_step()

    def train(self, first: int, last: int) -> list[dict]:
        """What two runs must have in common after each step."""
        training, after = getattr(self.compression, "training", self.compression), []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(10 * step + rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 64, generator=generator)).square().mean().backward()
            self.reduce()
            self.optimizer.step()
            weights = [each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters()]
            kept = {name: digest(each) for name, each in sorted(training.residuals.by_name.items())}
            state = {"step": training.step, "tightening": training.state_dict()["tightening"]}
            after.append({"weights": [digest(each) for each in weights], "kept": kept} | state)
        return after


class WithDDP(Run):
    """Has one parameter, as DDP begins with other buckets than it goes on with."""

    def wrapped(self, model):
        return DistributedDataParallel(nn.Linear(64, 100, bias=False))

    def compressed(self):
        return ddp.compress(self.model, CONFIG)

    def reduce(self):
        pass


class WithFSDP(Run):
    def wrapped(self, model):
        return fully_shard(model)

    def compressed(self):
        return fsdp.compress(self.model, CONFIG)

    def reduce(self):
        pass


def save(run: Run, name: str) -> None:
    state = {"model": run.model.state_dict(), "compression": run.compression.state_dict()}
    torch.save(state, folder / f"{name}, torch.save {rank}.pt")
    state = {"model": run.model.state_dict(), "compression": run.compression}
    dcp.save(state, checkpoint_id=folder / f"{name}, dcp.save")
    dcp.async_save(state, checkpoint_id=folder / f"{name}, dcp.async_save").result()


def load(run: Run, name: str, way: str) -> None:
    if way != "torch.save":
        state = {"model": run.model.state_dict(), "compression": run.compression}
        return dcp.load(state, checkpoint_id=folder / f"{name}, {way}")
    state = torch.load(folder / f"{name}, torch.save {rank}.pt", weights_only=name != "FSDP2")  # it has DTensors
    run.model.load_state_dict(state["model"])
    run.compression.load_state_dict(state["compression"])


kinds = {"Communicator": Run, "DDP": WithDDP}
if hasattr(FSDPModule, "set_custom_reduce_scatter"):  # torch 2.9
    kinds["FSDP2"] = WithFSDP
result = {}
for name, kind in kinds.items():
    for way in WAYS if job == "resume" else ["save"]:
        run = kind()
        if job == "resume":
            load(run, name, way)
        else:
            run.train(0, STOP)
            save(run, name)
        result[f"{name}, {way}"] = run.train(STOP, STEPS)
finish(result)
