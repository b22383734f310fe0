"""What lasts from step to step, with communicators of 4 ranks, flat and on 2 nodes of 2 ranks each."""

import pytest
import torch
import torch.distributed as dist
from on_rank import BF16_ROUNDING, digest, raises, rank, same_on_all_ranks, saved, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, UnsupportedError
from ncz_plugins.cli.perf.contenders.collectives import all_gather_single
from ncz_plugins.core.training.policy import ParameterSlice

STEPS = 5
PARTS = [
    ParameterSlice("first.weight", 60_000),
    ParameterSlice("first.bias", 64),
    ParameterSlice(None, 36),
    ParameterSlice("second.weight", 39_900),
]
NUMEL = sum(part.length for part in PARTS)
UNUSED = 1  # the step in which no rank uses the first parameter; in the next one, one rank does not
HIERARCHIES = pytest.mark.parametrize("hierarchy", ["off", 2])


def gradients(r: int, step: int) -> torch.Tensor:
    tensor = values(r, NUMEL, seed=1000 * step)
    if step == UNUSED or (step, r) == (UNUSED + 1, 0):
        tensor[: PARTS[0].length] = 0
    return tensor


def exact(step: int) -> torch.Tensor:
    return sum(gradients(r, step).double() for r in range(world_size)) / world_size


def settings(hierarchy="off", kind="error_bound", **sections) -> dict:
    quantizer = {"kind": kind, "value": 1.5, "error_feedback": True}
    return {"quantizer": quantizer, "transport": {"min_bytes": 0, "hierarchy": hierarchy}, **sections}


def missing(communicator: Communicator, reduce) -> torch.Tensor:
    """How much of the exact average over all steps has not come out, of the first parameter."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(STEPS):
        reduced = reduce(communicator, gradients(rank, step)).double()
        if step == UNUSED:
            reduced[: PARTS[0].length] = 0  # what comes out is dropped
        total += reduced
        communicator.end_step()
    return (sum(exact(step) for step in range(STEPS)) - total)[: PARTS[0].length]


def all_reduced(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    communicator.all_reduce(tensor, dist.ReduceOp.AVG, parts=PARTS)
    return tensor


def reduce_scattered(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """The shares of all ranks."""
    share = torch.empty(NUMEL // world_size)
    communicator.reduce_scatter_single(share, tensor, dist.ReduceOp.AVG, parts=PARTS)
    shares = torch.empty(NUMEL)
    all_gather_single(shares, share)
    return shares


@ranks(4)
@HIERARCHIES
def test_what_error_feedback_has_not_sent_is_what_it_holds(group, hierarchy):
    """On all ranks together, of their own sums or of those of their nodes."""
    for reduce in (all_reduced, reduce_scattered):
        with Communicator(settings(hierarchy), group) as communicator:
            lost = missing(communicator, reduce)
            left = communicator.training.residuals.of(PARTS[0], torch.zeros(1)).double()
            dist.all_reduce(largest := left.abs().max(), dist.ReduceOp.MAX, group=group)
            dist.all_reduce(left, group=group)
            torch.testing.assert_close(left / world_size, lost, rtol=0, atol=STEPS * largest.item() * BF16_ROUNDING)
            assert lost.abs().max() > 0.1
            assert communicator.stats.total.bypasses == {}
            same_on_all_ranks(digest(lost), group)


@ranks(4)
def test_policies(group):
    """What is skipped is exact, what is not is compressed, in one call each, and the result is put back in place."""
    policies = [{"name": "*.bias", "action": "skip"}, {"name": "second.*", "quantizer": {"value": 0.01}}]
    with Communicator(settings(policies=policies), group) as communicator:
        tensor = gradients(rank, 0)
        handle = communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True, parts=PARTS)
        handle.wait()
        assert handle.is_completed()
        first, bias, _, second = tensor.split([part.length for part in PARTS])
        wanted = exact(0).split([part.length for part in PARTS])
        torch.testing.assert_close(bias.double(), wanted[1], rtol=1e-6, atol=1e-6)
        assert (second - wanted[3]).abs().max() < 0.01 * world_size * 1.1
        assert (first - wanted[0]).abs().max() > 0.01 * world_size * 1.1
        assert communicator.stats.total.calls == 3 and communicator.stats.total.bypasses == {"policy": 1}
        same_on_all_ranks(digest(tensor), group)
        share = torch.empty(NUMEL // world_size)
        different = "default and policies[0] and policies[1]"
        raises(UnsupportedError, lambda: communicator.reduce_scatter_single(share, tensor, parts=PARTS), different)
        raises(UnsupportedError, lambda: communicator.all_reduce(tensor), "pass name=")


@ranks(4)
@HIERARCHIES
@pytest.mark.parametrize("strided", [False, True])
def test_policies_of_what_is_scattered(group, hierarchy, strided):
    """Each rank gets its share of each parameter, with what error feedback keeps by other names."""
    shares = [("weight", 30_000, (300, -1)), ("bias", 40, (-1,)), ("other", 20_000, (200, -1))]  # -1: the rest
    parts, kept_as = (
        [
            ParameterSlice(
                f"{prefix}{name}", n, r * n, world_size * n, shape=torch.empty(world_size * n).view(shape).shape
            )
            for r in range(world_size)
            for name, n, shape in shares
        ]
        for prefix in ("", "kept ")
    )
    policies = [{"shape": "vector", "action": "skip"}, {"name": "other", "quantizer": {"kind": "lossless"}}]
    lengths = [n for _, n, _ in shares]
    with Communicator(settings(hierarchy, policies=policies), group) as communicator:
        of_ranks = [values(r, world_size * sum(lengths), seed=7) for r in range(world_size)]
        given, share = of_ranks[rank].clone(), torch.empty(sum(lengths))
        if strided:
            given, share = (torch.stack([each, each], dim=1)[:, 0] for each in (given, share))
        communicator.reduce_scatter_single(share, given, dist.ReduceOp.AVG, parts=parts, kept_as=kept_as)
        assert torch.equal(given, of_ranks[rank])
        wanted = (sum(each.double() for each in of_ranks) / world_size).view(world_size, -1)[rank].split(lengths)
        weight, bias, other = share.split(lengths)
        torch.testing.assert_close(bias.double(), wanted[1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other.double(), wanted[2], rtol=1e-6, atol=1e-6)
        [(name, kept)] = communicator.training.residuals.by_name.items()
        dist.all_reduce(left := kept.double(), group=group)
        left = left.view(world_size, -1)[rank] / world_size
        torch.testing.assert_close(wanted[0] - weight, left, rtol=BF16_ROUNDING, atol=left.abs().max().item() * 2**-7)
        assert name == "kept weight" and left.abs().max() > 0.1
        total = communicator.stats.total
        assert (total.calls, total.compressed_calls, total.bypasses) == (3, 2, {"policy": 1})


@ranks(4)
@HIERARCHIES
def test_a_run_that_stops_and_goes_on_is_to_the_bit_one_that_does_not_stop(group, hierarchy):
    """Warm-up and the schedule go on where they were."""
    config = settings(
        hierarchy, "stochastic", steps={"warmup": 1, "bounds": [{"step": 0, "times": 0.5}, {"step": 4, "times": 2}]}
    )
    with Communicator(config, group) as communicator:
        whole = steps(communicator, 0, 6)
        assert communicator.stats.total.bypasses == {"warm-up": 1}
    with Communicator(config, group) as communicator:
        halves = steps(communicator, 0, 3)
        state = saved(communicator.training)
    with Communicator(config, group) as communicator:
        communicator.training.load_state_dict(state)
        halves += steps(communicator, 3, 6)
    assert whole == halves
    with Communicator(config, group) as communicator:
        communicator.training.step = 3
        assert steps(communicator, 3, 6) != whole[3:]  # the state does make the difference
    torch.set_default_dtype(torch.bfloat16)  # no tensor of ours has it, nor those by which ranks of a node find memory
    torch.set_default_device("meta")
    try:
        with Communicator(config, group) as communicator:
            assert steps(communicator, 0, 6) == whole
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    same_on_all_ranks(whole, group)


def steps(communicator: Communicator, first: int, last: int) -> list[str]:
    """A hash of what came out of each step."""
    digests = []
    for step in range(first, last):
        tensor = gradients(rank, step)
        if step == 3:
            tensor *= 1e-12  # for a bound in mode abs nothing but zero
        communicator.all_reduce(tensor, dist.ReduceOp.AVG, parts=PARTS)
        digests.append(digest(tensor))
        communicator.end_step()
    return digests
