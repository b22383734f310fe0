"""Weights of trainers and receivers that are sharded: each rank makes the patch of its own shards, and each receiver
writes what it needs into the shards that it has, in any other layout."""

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_rank import folder, raises, rank, start, world_size
from scenarios import on_ranks, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ncz_plugins import (
    MismatchError,
    UnsupportedError,
    WeightPublisher,
    WeightSync,
    apply_patch,
    make_patch,
    stage_patch,
)

TRAINERS, VERSIONS = 4, 3
LAYOUTS = ["rows", "columns", "whole"]  # of receivers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 24)  # no multiple of the ranks: shards are uneven
        self.up = nn.Linear(24, 64)
        self.down = nn.Linear(64, 24, bias=False)
        self.head = nn.Linear(24, 37, bias=False)
        self.norm = nn.LayerNorm(3)  # shorter than the ranks: some hold nothing of it
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        return self.head(self.norm(x.unflatten(-1, (8, 3))).flatten(-2))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Model().bfloat16()


def whole(state: dict) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}


def wrapped(layout: str) -> nn.Module:
    """A model in a layout of the trainers."""
    made = model()
    if layout == "hsdp":
        return fully_shard(made, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if layout == "fsdp and tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(made, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(made, mesh=mesh["shard"])
    return fully_shard(made)


def train(layout: str) -> list[int]:
    """Publish some versions. Each rank leaves its patches; the first one leaves what is right as well."""
    start()
    made = wrapped(layout)
    made.steps.fill_(0)
    exact: dict[str, torch.Tensor] = {}
    optimizer, publisher, sizes = torch.optim.SGD(made.parameters(), lr=1.0), WeightPublisher(), []
    for version in range(VERSIONS):
        for _ in range(version):
            optimizer.zero_grad()
            made(torch.arange(37)).float().square().mean().backward()
            optimizer.step()
            made.steps += 1
        before = publisher.identity if version else None
        publisher.publish(made.state_dict())
        patch = publisher.patch(before)
        sizes.append(len(patch))
        Path(folder().parent / f"{version}-{rank}.patch").write_bytes(patch)
        former, exact = exact, whole(made.state_dict())
        assert not version or not torch.equal(exact["up.weight"], former["up.weight"])
        if rank == 0:
            torch.save(exact, folder().parent / f"{version}.pt")
    return sizes


def follow_all(layouts: list[str]) -> dict[str, str]:
    """For each layout nothing, or how it failed."""
    start()
    found = {}
    for layout in layouts:
        try:
            follow(layout)
            found[layout] = ""
        except Exception:
            found[layout] = traceback.format_exc()
        dist.barrier()
    return found


def follow(layout: str) -> None:
    """Receive all versions into shards of another layout."""
    made, home = model(seed=1), folder().parent
    made.steps.fill_(-1)
    mesh = init_device_mesh("cpu", (world_size,))
    if layout == "columns":
        state = {
            name: distribute_tensor(x.detach(), mesh, [Shard(1) if x.dim() > 1 else Replicate()])
            for name, x in made.state_dict().items()
        }
    elif layout == "rows":
        state = fully_shard(made, mesh=mesh).state_dict()
    else:
        state = {name: x for name, x in made.state_dict().items() if name.startswith("up") or name == "head.weight"}
    memory, held = {name: id(x) for name, x in state.items()}, None
    mixed = [Path(home / f"{each == 2:d}-{each}.patch").read_bytes() for each in range(TRAINERS)]
    raises(MismatchError, lambda: stage_patch(mixed, state), "1 (rank", "2 (rank 2)", "one version")
    for version in range(VERSIONS):
        patches = [Path(home / f"{version}-{each}.patch").read_bytes() for each in range(TRAINERS)]
        staged = stage_patch(patches, state, decoded=version == 1, versions=held)
        staged.apply()
        held = staged.versions
        exact = torch.load(home / f"{version}.pt", weights_only=True)
        for name, x in whole(state).items():
            assert torch.equal(x, exact[name]), (version, name)
        assert memory == {name: id(x) for name, x in state.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders with the versions of trainers, by layout."""
    folders = {}

    def of(layout: str) -> Path:
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp("weights")
            folders[layout, "sizes"] = on_ranks(TRAINERS, train, folders[layout], layout)
        return folders[layout]

    of.sizes = lambda layout: folders[layout, "sizes"]
    return of


@pytest.fixture(scope="module")
def received(published, request):
    """How so many receivers have fared with each layout, by rank."""
    return on_ranks(request.param, follow_all, published("fsdp"), LAYOUTS)


@pytest.mark.parametrize("received", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_of_fsdp_to_any_receivers(received, layout):
    assert not any(each[layout] for each in received), [each[layout] for each in received]


@pytest.mark.parametrize("trainers", ["hsdp", "fsdp and tensor parallel"])
def test_other_layouts_of_trainers(published, trainers):
    for receivers, layout in ((3, "rows"), (2, "columns")):
        for each in on_ranks(receivers, follow_all, published(trainers), [layout]):
            assert not each[layout], each[layout]


def test_a_rank_publishes_its_own_shards_alone(published):
    """All patches together are little more than that of one rank that holds all. Replicas are sent once."""
    exact = torch.load(published("fsdp") / "0.pt", weights_only=True)
    alone = len(make_patch(exact))
    first, *others = [sizes[0] for sizes in published.sizes("fsdp")]
    assert max(first, *others) < 0.6 * alone and sum((first, *others)) < 2 * alone
    published("hsdp")
    assert all(sizes[0] < 1000 for sizes in published.sizes("hsdp")[2:])


@ranks(2)
def test_one_rank_does_not_send_what_others_hold(group):
    state, sync = fully_shard(model()).state_dict(), WeightSync(group)
    if rank == 0:
        raises(UnsupportedError, lambda: sync.publish(state), "make_patch on every rank")
    else:
        raises(MismatchError, sync.receive, "could not publish")


@ranks(2)
def test_a_rank_that_could_not_publish_is_noticed_and_all_go_on(group):
    """It still has the version before, which fits to that of the other rank in all but its number."""
    made, publisher, found = fully_shard(model()), WeightPublisher(), []
    for version in range(1, 4):
        state = made.state_dict()
        if version == 2 and rank == 1:
            raises(UnsupportedError, lambda: publisher.publish({"x": torch.ones(2).to_sparse()}), "x")
        else:
            publisher.publish(state)
        patches = [None, None]
        dist.all_gather_object(patches, publisher.patch())
        found.append(patches)
    for number in (0, 2):
        assert apply_patch(found[number]).keys() == made.state_dict().keys()
    raises(MismatchError, lambda: apply_patch(found[1]), "versions 2 (rank 0) and 1 (rank 1)")


@ranks(2)
def test_patches_of_a_run_before_are_told_apart_by_the_step(group):
    """Both runs publish once, so that calls have the same number."""
    state, runs = fully_shard(model()).state_dict(), []
    for step in (10, 20):
        publisher, patches = WeightPublisher(), [None, None]
        publisher.publish(state, number=step)
        dist.all_gather_object(patches, publisher.patch())
        runs.append(patches)
    assert apply_patch(runs[1]).keys() == state.keys()
    raises(MismatchError, lambda: apply_patch([runs[1][0], runs[0][1]]), "versions 20 (rank 0) and 10 (rank 1)")
