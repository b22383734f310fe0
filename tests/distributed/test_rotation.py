"""Matrices coded in bases of their own: the same bits on all ranks, and in a run that stopped and went on."""

import math

import torch
import torch.distributed as dist
from on_rank import device, digest, raises, rank, same_on_all_ranks, saved, values, world_size
from scenarios import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import Communicator
from ncz_plugins.core.errors import MismatchError
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.torch import ddp

PARTS = [
    ParameterSlice(f"p{at}", math.prod(shape), shape=shape)
    for at, shape in enumerate([(96, 200), (33,), (150, 70), (64, 64)])
]
NUMEL = sum(part.length for part in PARTS)
QUANTIZER = {"kind": "error_bound", "value": 0.05, "error_feedback": True, "rotation": True}
SETTINGS = {"quantizer": QUANTIZER, "transport": {"min_bytes": 0}}


def steps(communicator: Communicator, first: int, last: int, dtype=torch.float32) -> list[str]:
    """A hash of what came out of each step."""
    digests = []
    for step in range(first, last):
        tensor = values(rank, NUMEL, seed=1000 * step).to(device, dtype)
        communicator.all_reduce(tensor, dist.ReduceOp.AVG, parts=PARTS)
        digests.append(digest(tensor))
        communicator.end_step()
    assert communicator.stats.total.bypasses == {}
    return digests


@ranks(2, 3, gpu=True)
def test_all_ranks_get_the_same_bits_with_any_number_of_threads(group):
    torch.set_num_threads(1 + rank)
    for dtype in (torch.float32, torch.bfloat16):
        with Communicator(SETTINGS, group) as communicator:
            found = steps(communicator, 0, 6, dtype)
        same_on_all_ranks(found, group)
        assert len(set(found)) == 6
    torch.set_num_threads(1)


@ranks(2, 3, gpu=True)
def test_a_run_that_stops_and_goes_on_is_to_the_bit_one_that_does_not_stop(group):
    with Communicator(SETTINGS, group) as communicator:
        whole = steps(communicator, 0, 6)
    with Communicator(SETTINGS, group) as communicator:
        halves = steps(communicator, 0, 3)
        state = saved(communicator.training)
    with Communicator(SETTINGS, group) as communicator:
        communicator.training.load_state_dict(state)
        halves += steps(communicator, 3, 6)
    assert whole == halves


@ranks(2, 3, gpu=True)
def test_gradients_of_ddp_in_any_memory_format(group):
    """Convolutions whose last dimension is not the last in memory, vectors, and matrices in one bucket."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 40))
    model = DistributedDataParallel(module.to(device, memory_format=torch.channels_last), process_group=group)
    compression = ddp.compress(model, SETTINGS)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(32, 8, 8, 8, generator=generator).to(device)
        model(x).square().mean().backward()
        with model.no_sync():
            exact = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
        for parameter, own in zip(module.parameters(), exact):
            dist.all_reduce(own, group=group)
            error = (parameter.grad - own / world_size).norm() / own.norm() * world_size
            assert error < 0.2
    same_on_all_ranks([digest(parameter.grad) for parameter in module.parameters()], group)
    assert compression.training.stats.total.bypasses == {}
    known = {name.rpartition("/")[2]: each for name, each in compression.training.rotations.by_name.items()}
    assert known["0.weight"].shape == (16, 72) and known["4.weight"].shape == (40, 256)
    compression.close()


@ranks(3)
def test_ranks_in_several_groups_find_the_same_owners(group):
    """Two of the ranks have added up another matrix before, by themselves."""
    pair, training = dist.new_group([0, 1]), Training(SETTINGS)
    part = [ParameterSlice("weight", 64 * 64, shape=(64, 64))]
    if rank < 2:
        with Communicator(None, pair, training) as communicator:
            for step in range(3):
                communicator.all_reduce(values(rank, 64 * 64, seed=step), parts=[part[0]._replace(name="expert")])
    with Communicator(None, group, training) as communicator:
        for step in range(6):
            tensor = values(rank, 64 * 64, seed=step)
            communicator.all_reduce(tensor, parts=part)
    same_on_all_ranks(digest(tensor), group)
    dist.destroy_process_group(pair)


@ranks(2)
def test_ranks_that_code_in_different_bases_are_told(group):
    """Each rank goes on with the state of another run."""
    states = []
    for run in range(2):
        with Communicator(SETTINGS, group) as communicator:
            for step in range(2):
                communicator.all_reduce(values(rank, NUMEL, seed=100 * run + step), parts=PARTS)
            states.append(communicator.training.state_dict())
    with Communicator(SETTINGS, group) as communicator:
        communicator.training.load_state_dict(states[rank])
        raises(MismatchError, lambda: communicator.all_reduce(values(rank, NUMEL), parts=PARTS), "bases of matrices")
