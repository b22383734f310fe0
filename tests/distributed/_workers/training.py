"""What lasts from step to step, with communicators of 4 ranks, flat and on 2 nodes of 2 ranks each."""

import io

import torch
import torch.distributed as dist
from common import digest, finish, start, values

from ncz_plugins import Communicator, UnsupportedError
from ncz_plugins.core.training.policy import ParameterSlice

rank, world_size = start()
STEPS = 5
PARTS = [
    ParameterSlice("first.weight", 60_000),
    ParameterSlice("first.bias", 64),
    ParameterSlice(None, 36),
    ParameterSlice("second.weight", 39_900),
]
NUMEL = sum(part.length for part in PARTS)
UNUSED = 1  # the step in which no rank uses the first parameter; in the next one, one rank does not
result = {}


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
        reduced = reduce(gradients(rank, step)).double()
        if step == UNUSED:
            reduced[: PARTS[0].length] = 0  # what comes out is dropped
        total += reduced
        communicator.end_step()
    return (sum(exact(step) for step in range(STEPS)) - total)[: PARTS[0].length]


# Feedback: what is missing in the end is what the residuals of all ranks hold, of their own or of their node's sums.
for hierarchy in ("off", 2):

    def in_place(tensor):
        communicator.all_reduce(tensor, dist.ReduceOp.AVG, parts=PARTS)
        return tensor

    def in_shares(tensor):
        share = torch.empty(NUMEL // world_size)
        communicator.reduce_scatter_tensor(share, tensor, dist.ReduceOp.AVG, parts=PARTS)
        shares = torch.empty(NUMEL)
        dist.all_gather_into_tensor(shares, share)
        return shares

    for name, reduce in (("all_reduce", in_place), ("reduce_scatter", in_shares)):
        with Communicator(settings(hierarchy)) as communicator:
            lost = missing(communicator, reduce)
            left = communicator.training.residuals.of(PARTS[0], torch.zeros(1)).double()
            dist.all_reduce(left)
            torch.testing.assert_close(left / world_size, lost, rtol=0, atol=1e-4)
            assert lost.abs().max() > 0.1
            assert communicator.stats.total.bypasses == {}
            result[f"{name} {hierarchy}"] = digest(lost)

# Policies: what is skipped is exact, what is not is compressed, in one call each; the result is put back in place.
policies = [{"name": "*.bias", "action": "skip"}, {"name": "second.*", "quantizer": {"value": 0.01}}]
with Communicator(settings(policies=policies)) as communicator:
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
    result["policies"] = digest(tensor)
    try:
        communicator.reduce_scatter_tensor(torch.empty(NUMEL // world_size), tensor, parts=PARTS)
    except UnsupportedError as error:
        assert "default and policies[0] and policies[1]" in str(error), error
    else:
        raise AssertionError("parts that are treated differently were taken")
    try:
        communicator.all_reduce(tensor)
    except UnsupportedError as error:
        assert "pass name=" in str(error), error
    else:
        raise AssertionError("error feedback without a name was taken")


# A run that stops and goes on is, to the bit, one that does not stop: warm-up and the schedule go on where they were.
def steps(communicator: Communicator, first: int, last: int) -> torch.Tensor:
    digests = []
    for step in range(first, last):
        tensor = gradients(rank, step)
        if step == 3:
            tensor *= 1e-12  # for a bound in mode abs nothing but zero
        communicator.all_reduce(tensor, dist.ReduceOp.AVG, parts=PARTS)
        digests.append(digest(tensor))
        communicator.end_step()
    return digests


for hierarchy in ("off", 2):
    config = settings(
        hierarchy, "stochastic", steps={"warmup": 1, "bounds": [{"step": 0, "times": 0.5}, {"step": 4, "times": 2}]}
    )
    with Communicator(config) as communicator:
        whole = steps(communicator, 0, 6)
        assert communicator.stats.total.bypasses == {"warm-up": 1}
    with Communicator(config) as communicator:
        halves = steps(communicator, 0, 3)
        file = io.BytesIO()
        torch.save(communicator.training.state_dict(), file)
    with Communicator(config) as communicator:
        communicator.training.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        halves += steps(communicator, 3, 6)
    assert whole == halves, hierarchy
    with Communicator(config) as communicator:
        communicator.training.step = 3
        assert steps(communicator, 3, 6) != whole[3:]  # the state does make the difference
    torch.set_default_dtype(torch.bfloat16)  # no tensor of ours has it, nor those by which ranks of a node find memory
    torch.set_default_device("meta")
    with Communicator(config) as communicator:
        assert steps(communicator, 0, 6) == whole
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    result[f"resumed {hierarchy}"] = whole

finish(result)
