"""What ranks find and send where several share a node. Usage: hierarchy.py COUNT, the elements of each tensor."""

import sys

import torch
import torch.distributed as dist
from common import digest, finish, start, values

from ncz_plugins import Communicator

BOUND = 0.05
numel = int(sys.argv[1])
rank, world_size = start()
everyone = [values(r, numel) for r in range(world_size)]
outcomes = {}


def check(name: str, got: torch.Tensor, exact: torch.Tensor, addends: int = 1) -> None:
    error = (got.double() - exact).abs().max().item()
    assert error <= addends * BOUND + 1e-5, f"{name}: error {error}"
    outcomes[name] = digest(got)


# The size is named, so that nothing is sent to measure the link.
config = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": "128KiB", "link_gbps": 1}}
with Communicator(config) as communicator:
    exact = sum(tensor.double() for tensor in everyone)
    tensor = everyone[rank].clone()
    communicator.all_reduce(tensor)
    check("all_reduce", tensor, exact, world_size)

    tensor = everyone[rank].clone()
    communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait()
    check("average", tensor, exact / world_size)

    part = torch.empty(numel // world_size)
    communicator.reduce_scatter_tensor(part, everyone[rank])
    check(f"reduce_scatter to {rank}", part, exact[rank * len(part) :][: len(part)], world_size)

    gathered = torch.empty(numel)
    parts = [tensor[: len(part)] for tensor in everyone]
    communicator.all_gather_into_tensor(gathered, parts[rank])
    check("all_gather", gathered, torch.cat(parts))

    for src in range(world_size):
        tensor = everyone[rank].clone()
        communicator.broadcast(tensor, src)
        check(f"broadcast from {src}", tensor, everyone[src])

    finish(
        {
            "digests": outcomes,
            "nodes": communicator.nodes.ranks,
            "by memory": communicator.nodes.processes is not None,
            "total": communicator.stats.to_dict()["total"],
        }
    )
