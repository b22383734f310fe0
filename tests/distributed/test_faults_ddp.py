"""A rank dies while DistributedDataParallel trains."""

import os

import pytest
import torch
import torch.distributed as dist
from on_rank import leave_alone, rank, start, world_size
from scenarios import run_ranks
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import NczError
from ncz_plugins.core.transport import mesh
from ncz_plugins.torch import ddp


def last_rank_dies_between_two_steps(schedule: str, most_ranks: int) -> None:
    mesh.MOST_RANKS = most_ranks  # above which ranks are connected with few others
    start()
    model = DistributedDataParallel(torch.nn.Linear(997, 1009))
    ddp.compress(model, {"transport": {"timeout_seconds": 20, "schedule": schedule}})

    def step() -> None:
        model(torch.randn(4, 997)).sum().backward()

    for _ in range(2):  # in the second one DDP itself says something over its group
        step()
    dist.barrier()
    if rank == world_size - 1:
        os._exit(3)
    errors = []
    for _ in range(2):
        try:
            step()
        except (RuntimeError, NczError) as error:
            errors.append([type(error).__name__, str(error)])
    leave_alone(errors)


@pytest.mark.parametrize(
    ("world_size", "schedule", "most_ranks"), [(2, "auto", 16), (3, "auto", 16), (3, "halving", 16), (4, "halving", 2)]
)
def test_a_dead_rank_ends_the_backward_pass_of_the_others(world_size, schedule, most_ranks, tmp_path):
    *others, dead = run_ranks(world_size, last_rank_dies_between_two_steps, tmp_path, schedule, most_ranks)
    assert dead.returncode == 3
    for each in others:
        assert each.returncode == 0, each.output
        (first, text), (second, again) = each.result
        assert first == "RuntimeError" and "PeerError: " in text  # as the backward pass has it
        assert second == "PeerError" and again in text
