"""The guard of a communicator: what it finds, which sums it takes, and what an alarm does on every rank."""

import sys

import torch
from common import digest, finish, start, values

from ncz_plugins import AccuracyError, Communicator

rank, world_size = start()
ELEMENTS = 40_001 * world_size
BUCKETS = ("embedding", "body", "head")
everyone = [values(r, ELEMENTS) for r in range(world_size)]
exact = sum(tensor.double() for tensor in everyone)
result = {}


def communicator(*, value=0.25, every=1, **guard) -> Communicator:
    return Communicator({"quantizer": {"value": value}, "guard": {"every": every, **guard}})


def guard_of(communicator: Communicator):
    return communicator.training.of_group(communicator.ranks).guard


def finish_step(communicator: Communicator) -> list:
    """The findings of the step, which ends."""
    found = guard_of(communicator).findings
    communicator.end_step()
    return [list(finding) for finding in found]


def figures(compressed: torch.Tensor, uncompressed: torch.Tensor) -> list[float]:
    """Relative error and cosine, computed without the guard."""
    c, u = compressed.double(), uncompressed.double()
    return [((c - u).norm() / u.norm()).item(), torch.nn.functional.cosine_similarity(c, u, dim=0).item()]


# What is found: the truth, and the sum itself is none the worse for it.
with communicator() as verified, communicator(every=0) as unverified:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        tensor, other = everyone[rank].to(dtype, copy=True), everyone[rank].to(dtype, copy=True)
        verified.all_reduce(tensor, name=name)
        unverified.all_reduce(other, name=name)
        result[f"all_reduce {name}"] = finish_step(verified)
        result[f"all_reduce {name}, expected"] = figures(tensor, sum(t.to(dtype).double() for t in everyone))
        result[f"all_reduce {name}, same bits"] = digest(tensor) == digest(other)
        result[f"all_reduce {name}, off"] = finish_step(unverified)
    part = torch.empty(ELEMENTS // world_size)
    verified.reduce_scatter_tensor(part, everyone[rank].clone(), torch.distributed.ReduceOp.AVG, name="scattered")
    result["reduce_scatter"] = finish_step(verified)
    parts = [torch.empty_like(part) for _ in range(world_size)]
    torch.distributed.all_gather(parts, part)
    result["reduce_scatter, expected"] = figures(torch.cat(parts), exact / world_size)

# What went plain is not verified: there is nothing to find.
with communicator() as one:
    tensor = everyone[rank].clone()
    tensor[0] = float("nan")
    one.all_reduce(tensor, name="not finite")
    result["plain"] = finish_step(one)
    one.all_reduce(everyone[rank][:100].clone(), name="too small")
    result["plain"] += finish_step(one)

# Every bucket has its turn.
with communicator(every=2) as one:
    result["turns"] = []
    for _ in range(10):
        handles = [one.all_reduce(everyone[rank].clone(), async_op=True, name=name) for name in BUCKETS]
        for handle in handles:
            handle.wait()
        result["turns"].append([finding[0] for finding in finish_step(one)])


def step(communicator: Communicator) -> list:
    communicator.all_reduce(everyone[rank].clone(), name="body")
    return finish_step(communicator)


# An alarm: one line, smaller bounds, or the end.
with communicator(value=5.0) as one:
    result["warned"] = [step(one) for _ in range(2)]
with communicator(value=5.0, on_alarm="tighten", max_relative_error=0.3) as one:
    result["tightened"] = [(*step(one)[0], guard_of(one).tightening) for _ in range(8)]
with communicator(value=5.0, every=3, on_alarm="stop") as one:
    one.training.step = 1  # so that two steps pass before the one that is verified
    for number in range(1, 9):
        try:
            step(one)
        except AccuracyError as error:
            result["stopped"] = [number, str(error)]
            break
sys.stdout.flush()
finish(result)
