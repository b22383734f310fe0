"""Workers that consist of named checks: each check, on all ranks, is a test. What it is about stands in the worker."""

from functools import cache

import pytest
from processes import DEVICES, Finished, names, passed, results, run
from torch.distributed import fsdp

WORLD_SIZES = {
    "defaults": [2],
    "ddp": [2, 3],
    "fsdp": [2, 4],
    "backend": [3],
}
# With what the first optimizer of PyTorch imports.
IMPORTS = {worker: f"ncz_plugins.torch.{worker},torch._dynamo" for worker in ("ddp", "fsdp", "backend")}
IMPORTS["defaults"] = "ncz_plugins.torch.backend,ncz_plugins.torch.ddp,ncz_plugins.torch.fsdp,torch._dynamo"
ON_GPU = {"ddp", "fsdp", "backend"}
FSDP_LETS_OTHERS_REDUCE = hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter")
RUNS = [(worker, world_size) for worker, sizes in WORLD_SIZES.items() for world_size in sizes]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(device, tmp_path_factory):
    """What the ranks of a worker left, which run once."""

    @cache
    def of(worker: str, world_size: int) -> list[Finished]:
        if device == "cuda" and worker not in ON_GPU:
            pytest.skip("is about CPUs")
        if worker in ("fsdp", "defaults") and not FSDP_LETS_OTHERS_REDUCE:
            pytest.skip("needs torch 2.9")
        imports = IMPORTS.get(worker, "ncz_plugins.core.communicator")
        return run(worker, world_size, tmp_path_factory.mktemp(worker), device, imports=imports)

    return of


@pytest.mark.parametrize(
    ("worker", "world_size", "name"),
    [(worker, world_size, name) for worker, world_size in RUNS for name in names(worker)],
)
def test_on_all_ranks(ranks, worker, world_size, name):
    passed(ranks(worker, world_size), name)


@pytest.mark.parametrize(("worker", "world_size"), RUNS)
def test_all_checks_ran_and_all_ranks_ended_well(ranks, worker, world_size):
    assert all(list(result) == names(worker) for result in results(ranks(worker, world_size)))
