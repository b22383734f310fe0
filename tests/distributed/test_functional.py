"""Collectives that autograd goes through: both directions are compressed alike, on real ranks."""

import pytest
import torch
from on_rank import rank, values, world_size
from scenarios import ranks
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ncz_plugins import Communicator, MismatchError
from ncz_plugins.torch import functional

BOUND = 0.01
WIDTH = 33
CONFIG = {
    "policies": [{"role": "activation", "quantizer": {"mode": "abs", "value": BOUND}}],
    "transport": {"min_bytes": 0},
    "roles": ["gradient", "activation"],
}


def splits() -> tuple[list[int], list[int]]:
    """Rows that come from each rank, and that go to each: another number for each two ranks, and none at all."""
    rows = [[40 * source + 101 * to for to in range(world_size)] for source in range(world_size)]
    return [of_one[rank] for of_one in rows], rows[rank]


def both_ways(exchange):
    """The output of an exchange, and the gradient of its input."""
    received, sent = splits()
    tokens = values(rank, sum(sent) * WIDTH, torch.float32).view(-1, WIDTH).requires_grad_()
    output = exchange(tokens, received, sent)
    (output * values(10 + rank, output.numel(), torch.float32).view_as(output)).sum().backward()
    return output.detach(), tokens.grad


def exactly(group):
    return both_ways(lambda *given: all_to_all_single_autograd(*given, group))


@ranks(1, 2, 3)
def test_both_directions_are_compressed_within_one_bound(group):
    with Communicator(CONFIG, group) as communicator:
        for got, exact in zip(
            both_ways(lambda *given: functional.all_to_all_single(*given, communicator)), exactly(group)
        ):
            assert got.shape == exact.shape and (not got.numel() or (got - exact).abs().max() <= BOUND + 1e-6)
            assert torch.equal(got, exact) == (world_size == 1)
        total = communicator.stats.total
        assert total.calls == 2 and total.compressed_calls == (2 if world_size > 1 else 0)
        received, sent = splits()
        rows = sum(received) + sum(sent) - 2 * sent[rank]
        assert total.plain_bytes_by_role == {"activation": 4 * WIDTH * rows}


@ranks(2, 3)
@pytest.mark.parametrize("config", [CONFIG | {"quantizer": {"kind": "lossless"}}, {"transport": {"min_bytes": 0}}])
def test_without_loss_or_the_role_it_is_the_function_of_torch(group, config):
    with Communicator(config, group) as communicator:
        found = both_ways(lambda *given: functional.all_to_all_single(*given, communicator))
        assert all(map(torch.equal, found, exactly(group)))
        bypasses = communicator.stats.total.bypasses
        assert bypasses == ({} if "quantizer" in config else {"role not enabled": 2})


@ranks(2)
def test_gradients_of_gradients_and_views(group):
    with Communicator(CONFIG | {"quantizer": {"kind": "lossless"}}, group) as communicator:
        tokens = torch.full((2, 6), 1.0 + rank, dtype=torch.float64).t().requires_grad_()  # not contiguous
        output = functional.all_to_all_single(tokens, None, None, communicator)
        assert output.tolist() == [[source + 1.0] * 2 for source in (0, 0, 0, 1, 1, 1)]
        [first] = torch.autograd.grad(output.pow(3).sum(), tokens, create_graph=True)
        assert torch.equal(first, 3 * tokens**2)  # the ranks of the other rows see their gradients, too
        [second] = torch.autograd.grad(first.sum(), tokens)
        assert torch.equal(second, 6 * tokens)
        expanded = torch.autograd.grad(functional.all_to_all_single(tokens, None, None, communicator).sum(), tokens)
        assert torch.equal(expanded[0], torch.ones_like(tokens))


@ranks(3)
def test_a_rank_that_differs_is_told(group):
    with Communicator(CONFIG, group) as communicator:
        sent = [2, 1, 1] if rank == 1 else [1, 1, 1]
        with pytest.raises(MismatchError, match="rank 1 sends 2 rows to rank 0, which expects 1"):
            functional.all_to_all_single(torch.ones(sum(sent), 3), [1, 1, 1], sent, communicator)
