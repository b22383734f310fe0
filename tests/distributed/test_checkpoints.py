"""A run that is stopped and resumed by new processes, by the ways that the guides show for PyTorch.

Those of the frameworks are tested where these are: tests/integration, and the programs of the pages in tests/docs.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_rank import digest, rank, start
from scenarios import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import Communicator
from ncz_plugins.torch import ddp, fsdp

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


def save(run: Run, name: str, folder: Path) -> None:
    state = {"model": run.model.state_dict(), "compression": run.compression.state_dict()}
    torch.save(state, folder / f"{name}, torch.save {rank}.pt")
    state = {"model": run.model.state_dict(), "compression": run.compression}
    dcp.save(state, checkpoint_id=folder / f"{name}, dcp.save")
    dcp.async_save(state, checkpoint_id=folder / f"{name}, dcp.async_save").result()


def load(run: Run, name: str, way: str, folder: Path) -> None:
    if way != "torch.save":
        state = {"model": run.model.state_dict(), "compression": run.compression}
        return dcp.load(state, checkpoint_id=folder / f"{name}, {way}")
    state = torch.load(folder / f"{name}, torch.save {rank}.pt", weights_only=name != "FSDP2")  # it has DTensors
    run.model.load_state_dict(state["model"])
    run.compression.load_state_dict(state["compression"])


KINDS = {"Communicator": Run, "DDP": WithDDP, "FSDP2": WithFSDP}
if not hasattr(FSDPModule, "set_custom_reduce_scatter"):  # before torch 2.9
    del KINDS["FSDP2"]


def save_in_the_middle(folder: str) -> dict[str, list]:
    """What each run that was not stopped found after it had saved."""
    start()
    found = {}
    for name, kind in KINDS.items():
        run = kind()
        run.train(0, STOP)
        save(run, name, Path(folder))
        found[name] = run.train(STOP, STEPS)
    return found


def go_on_from_each(folder: str) -> dict[str, list]:
    """What each resumed run found."""
    start()
    found = {}
    for name, kind in KINDS.items():
        for way in WAYS:
            run = kind()
            load(run, name, way, Path(folder))
            found[f"{name}, {way}"] = run.train(STOP, STEPS)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of the runs that were not stopped found, and those of the resumed ones."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [on_ranks(2, job, folder, folder) for job in (save_in_the_middle, go_on_from_each)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(runs, name, way):
    for whole, resumed in zip(*runs):
        assert resumed[f"{name}, {way}"] == whole[name]


def test_each_rank_has_a_state_of_its_own_that_changes_with_each_step(runs):
    """Else the test above would pass with the state of another rank, or of none."""
    for first, second in zip(*(found.values() for found in runs[0])):
        assert len({*(str(step["kept"]) for step in first + second)}) == len(first + second) == 6
        assert [step["step"] for step in first] == [4, 5, 6]
        assert first[-1]["tightening"] < first[0]["tightening"] < 1
