"""DistributedDataParallel with compressed gradients: each check of the worker, on all ranks, is a test."""

import pytest
from processes import DEVICES, names, passed, results, run


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, device, tmp_path_factory):
    return run("ddp", request.param, tmp_path_factory.mktemp("ddp"), device, imports="ncz_plugins.torch.ddp")


@pytest.mark.parametrize("name", names("ddp"))
def test_on_all_ranks(ranks, name):
    passed(ranks, name)


def test_all_checks_ran_and_all_ranks_ended_well(ranks):
    assert all(list(result) == names("ddp") for result in results(ranks))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dead_rank_ends_the_backward_pass_of_the_others(world_size, tmp_path):
    *others, dead = run("ddp_death", world_size, tmp_path, imports="ncz_plugins.torch.ddp")
    assert dead.returncode == 3
    for each in others:
        assert each.returncode == 0, each.output
        (first, text), (second, again) = each.result["errors"]
        assert first == "RuntimeError" and "PeerError: " in text  # as the backward pass has it
        assert second == "PeerError" and again in text
        assert each.result["seconds"] < 15  # sooner than the time-out
