"""FSDP2 with compressed gradients: each check of the worker, on all ranks, is a test."""

import pytest
from processes import DEVICES, names, passed, results, run
from torch.distributed import fsdp

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"), reason="needs torch 2.9"
)


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, device, tmp_path_factory):
    return run("fsdp", request.param, tmp_path_factory.mktemp("fsdp"), device, imports="ncz_plugins.torch.fsdp")


@pytest.mark.parametrize("name", names("fsdp"))
def test_on_all_ranks(ranks, name):
    passed(ranks, name)


def test_all_checks_ran_and_all_ranks_ended_well(ranks):
    assert all(list(result) == names("fsdp") for result in results(ranks))
