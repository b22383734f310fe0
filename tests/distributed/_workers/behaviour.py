"""Everything about a communicator that is not a number: handles, bypasses, groups, life and death."""

import gc
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from common import digest, finish, start, values

from ncz_plugins import Communicator, Config, ConfigError, MismatchError, NczError, UnsupportedError

rank, world_size = start()
everyone = [values(r, 100_000) for r in range(world_size)]
exact = sum(everyone)
result = {}


def raises(error: type, call, *words: str) -> None:
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def bypasses(communicator: Communicator) -> dict:
    return dict(communicator.stats.total.bypasses)


# Bypasses: each with its reason, each with torch.distributed's exact result.
with Communicator() as communicator:
    integers = torch.arange(50_000)
    communicator.all_reduce(integers)
    assert torch.equal(integers, torch.arange(50_000) * world_size)
    small = everyone[rank][:100].clone()
    communicator.all_reduce(small)
    plain = everyone[rank][:100].clone()
    dist.all_reduce(plain)
    assert torch.equal(small, plain)
    largest = everyone[rank].clone()
    communicator.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack(everyone).amax(0))
    weights = everyone[rank].clone()
    communicator.all_reduce(weights, role="parameter")
    plain = everyone[rank].clone()
    dist.all_reduce(plain)
    assert torch.equal(weights, plain)
    empty = torch.empty(0)
    communicator.all_reduce(empty)
    average = everyone[rank][:100].clone()
    handle = communicator.all_reduce(average, dist.ReduceOp.AVG, async_op=True)  # plain, as it is small
    handle.wait()
    handle.wait()
    assert handle.is_completed()
    torch.testing.assert_close(average, exact[:100] / world_size)
    result["early bypasses"] = bypasses(communicator)

# NaN and infinity come through, on every rank, at their own places.
with Communicator() as communicator:
    for poison in (float("nan"), float("inf"), float("-inf")):
        tensor = everyone[rank].clone()
        if rank == world_size - 1:
            tensor[77_777] = poison
        communicator.all_reduce(tensor)
        assert not tensor[77_777].isfinite()
        assert tensor.isfinite().sum() == tensor.numel() - 1
        part = torch.empty(100_000)
        whole = torch.cat(everyone)
        if rank == 0:
            whole[-1] = poison
        communicator.reduce_scatter_tensor(part, whole)
        assert part.isfinite().all() == (rank != world_size - 1)
    tensor = torch.full((100_000,), 1.0, dtype=torch.float64)
    result["late bypasses"] = bypasses(communicator)
with Communicator({"quantizer": {"mode": "abs", "value": 1e-12}}) as communicator:
    tensor = everyone[rank].clone()
    communicator.all_reduce(tensor)
    plain = everyone[rank].clone()
    dist.all_reduce(plain)
    assert torch.equal(tensor, plain)
    result["overflow"] = bypasses(communicator)
with Communicator({"quantizer": {"mode": "rel", "value": 1e-5}}) as communicator:
    tensor = everyone[rank].bfloat16()
    communicator.all_reduce(tensor)
    result["not worth it"] = bypasses(communicator)

# Without loss, all of that passes compressed, and a sum is what adding in the order of ranks gives.
lossless = {"quantizer": {"kind": "lossless"}, "transport": {"schedule": "direct"}, "entropy": {"checksum": True}}
with Communicator(lossless) as communicator:
    poisoned = [tensor.clone() for tensor in everyone]
    poisoned[0][7], poisoned[-1][77_777] = float("nan"), float("inf")
    tensor = poisoned[rank].clone()
    communicator.all_reduce(tensor, dist.ReduceOp.AVG)
    assert digest(tensor) == digest(sum(poisoned) / world_size)
    gathered = torch.empty(100_000 * world_size)
    communicator.all_gather_into_tensor(gathered, poisoned[rank])
    assert digest(gathered) == digest(torch.cat(poisoned))
    total = communicator.stats.total
    assert total.compressed_calls == 2 and not total.bypasses and total.ratio > 1.05

# At random, but alike everywhere, and another error in every call.
with Communicator({"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.5}}) as communicator:
    errors = []
    for _ in range(20):
        tensor = everyone[rank].clone()
        communicator.all_reduce(tensor)
        errors.append(tensor - exact)
    assert all(error.abs().max() <= 0.5 * world_size + 1e-4 for error in errors)
    assert sum(errors).abs().mean() < 0.5 * sum(error.abs().mean() for error in errors)
    result["stochastic"] = digest(tensor)

# Handles: many at once, waited for in any order, from another thread too, results in place.
with Communicator({"quantizer": {"mode": "rms", "value": 0.01}}) as communicator:
    tensors = [values(rank, 40_000 + i, seed=i) for i in range(12)]
    handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()  # the group itself stays free for others meanwhile
    for handle in reversed(handles):
        assert handle.wait() is True and handle.is_completed() and handle.is_success()
        assert handle.exception() is None
    for i, tensor in enumerate(tensors):
        wanted = sum(values(r, 40_000 + i, seed=i) for r in range(world_size))
        assert (tensor - wanted).abs().max() < 0.05 * world_size**2
    result["async"] = [digest(tensor) for tensor in tensors]
    tensor = everyone[rank].clone()
    handle = communicator.all_reduce(tensor, async_op=True)
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    waiter.join(30)
    assert not waiter.is_alive()
    result["bytes"] = communicator.stats.to_dict()["total"]

# What rank 0 writes down over two starts is what it counted. Where it can't, all ranks learn of it.
result["file"] = str(Path(os.environ["NCZ_TEST_RESULT"]).with_name("recorded.jsonl"))
result["counted"], state = [], None
for _ in range(2):
    with Communicator({"statistics": {"jsonl": result["file"]}, "guard": {"every": 2}}) as communicator:
        if state is not None:
            communicator.training.load_state_dict(state)
        for _ in range(3):
            communicator.all_reduce(everyone[rank].clone(), name="body")
            communicator.all_reduce(everyone[rank][:100].clone(), name="bias")
            result["counted"].append(communicator.end_step().to_dict())
        state = communicator.training.state_dict()
unwritable = {"statistics": {"jsonl": f"{result['file']}/below a file"}}
words = ("rank 0", "statistics.jsonl", "cannot be written")
raises(MismatchError if rank else ConfigError, lambda: Communicator(unwritable), *words)

# Shapes: anything contiguous; what is not is refused with the remedy.
with Communicator({"transport": {"min_bytes": 0}}) as communicator:
    cube = everyone[rank][:99_000].clone().view(10, 99, 100)
    communicator.all_reduce(cube)
    scalar = torch.tensor(float(rank))
    communicator.all_reduce(scalar)
    assert cube.shape == (10, 99, 100) and scalar.shape == ()
    raises(UnsupportedError, lambda: communicator.all_reduce(cube.transpose(0, 1)), "contiguous()")
    raises(UnsupportedError, lambda: communicator.all_reduce(torch.empty(9, device="meta")), "meta", "CPU")
    raises(ValueError, lambda: communicator.reduce_scatter_tensor(torch.empty(3), torch.empty(4)), "4 elements")
    raises(UnsupportedError, lambda: communicator.broadcast(cube, 99), "src=99")

# Closing: twice is fine, using it afterwards is not.
communicator = Communicator()
communicator.close()
communicator.close()
if world_size > 1:
    raises(NczError, lambda: communicator.all_reduce(everyone[rank].clone()), "closed")

# Subgroups: of any shape, several over the same ranks, made in the same order by their members only.
if world_size >= 3:
    pair = dist.new_group([0, world_size - 1])
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    if rank in (0, world_size - 1):
        first, second = Communicator(group=pair), Communicator({"transport": {"schedule": "direct"}}, pair)
        one, two = everyone[rank].clone(), everyone[rank].clone()
        handle = first.all_reduce(one, async_op=True)
        second.all_reduce(two)
        handle.wait()
        assert torch.equal(one, two)
        third = everyone[rank].clone()
        first.broadcast(third, world_size - 1)  # src is a global rank, as in torch.distributed
        assert (third - everyone[-1]).abs().max() < world_size
        first.close()
        second.close()
    own = everyone[rank].clone()
    Communicator(group=alone).all_reduce(own)
    assert torch.equal(own, everyone[rank])


# Making and closing many leaves nothing behind.
def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def cycle() -> None:
    with Communicator() as communicator:
        communicator.all_reduce(everyone[rank].clone())


for _ in range(3):
    cycle()
gc.collect()
dist.barrier()
before, threads = open_files(), threading.active_count()
for _ in range(20):
    cycle()
gc.collect()
dist.barrier()
result["leaked"] = [open_files() - before, threading.active_count() - threads]

assert Config.load("ncclz") == communicator.config
finish(result)
