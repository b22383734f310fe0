"""Every peer on this rank: one collective after another, sizes that divide by nothing, twice each.

Leaves, for each collective and peer, [relative L2 error, digest of the result] of every run, and the rest that is told.
"""

import os
from functools import cache

import torch
import torch.distributed as dist
from common import digest, finish, start, values

from benchmarks.laboratory.peers import CONTENDERS
from ncz_plugins import Config
from ncz_plugins.cli.perf import COLLECTIVES
from ncz_plugins.cli.perf.contenders import Context

SIZES = (1, 2, 7, 1009, 100_003, 1_200_007)  # in the last one, hivemind's segments have several parts

rank, world_size = start()
os.environ["NCZ_TEST_RESULT"] = f"{os.environ['NCZ_TEST_FOLDER']}/rank{rank}.json"


@cache
def held(numel: int, seed: int) -> list[torch.Tensor]:
    """What every rank holds; drawn once for all peers."""
    return [values(r, numel, seed=seed) for r in range(world_size)]


@cache
def exact(collective: str, numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank should have in the end, of float64, and the norm of what goes into it."""
    everyone = [one.double() for one in held(numel, seed)]
    if collective == "broadcast":
        return everyone[0], everyone[0].norm()
    if collective == "all_gather":
        return torch.cat(everyone), torch.cat(everyone).norm()
    if collective == "reduce_scatter":
        everyone = [tensor.chunk(world_size)[rank] for tensor in everyone]
    return sum(everyone), torch.cat(everyone).norm()


def check(name: str, collective: str, context: Context) -> dict:
    """All sizes of one peer; the second run of each has other values, and no new buffers."""
    runs = []
    with CONTENDERS[name].open(context) as exchange:
        assert exchange.details() == {} or name == "ncz"
        for size in SIZES:
            numel = size * world_size if collective == "reduce_scatter" else size
            for seed in (1, 2):
                everyone = held(numel, seed)
                tensor = everyone[rank].clone()
                wanted, scale = exact(collective, numel, seed)
                exchange.load(tensor)
                result = exchange.run()
                assert torch.equal(tensor, everyone[rank]), f"{name} changed its input"
                assert (result.dtype, result.shape) == (torch.float32, wanted.shape), name
                found = result.double() * (world_size if exchange.op == "avg" else 1)
                runs.append([float((found - wanted).norm() / scale), digest(result)])
        return {"op": exchange.op, "runs": runs, "details": exchange.details()}


def low_rank(terms: int, context: Context, name: str) -> list[float]:
    """The errors of a peer on matrices of this rank, alike but for factors on all ranks, call after call."""
    u, v = values(0, 130 * terms).view(130, terms), values(1, 130 * terms).view(terms, 130)
    errors = []
    with CONTENDERS[name].open(context) as exchange:
        for call in range(3):
            factors = [values(r, terms, seed=10 + call) for r in range(world_size)]
            everyone = [((u * f) @ v).flatten() for f in factors]
            wanted = sum(matrix.double() for matrix in everyone)
            exchange.load(everyone[rank])
            found = exchange.run().double() * world_size
            errors.append(float((found - wanted).norm() / wanted.norm()))
    return errors


results = {}
for collective in COLLECTIVES:
    context = Context(Config(), dist.group.WORLD, world_size, rank, collective)
    names = [name for name, peer in CONTENDERS.items() if collective in peer.collectives and peer.missing() is None]
    results[collective] = {name: check(name, collective, context) for name in names}
context = Context(Config(), None, world_size, rank, "all_reduce")
results["low rank"] = {terms: low_rank(terms, context, f"ddp-powersgd-{terms}") for terms in (1, 4)}
finish(results)
