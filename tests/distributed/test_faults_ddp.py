"""A rank dies while DistributedDataParallel trains."""

import pytest
from processes import run


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dead_rank_ends_the_backward_pass_of_the_others(world_size, tmp_path):
    *others, dead = run("ddp_death", world_size, tmp_path, imports="ncz_plugins.torch.ddp,torch._dynamo")
    assert dead.returncode == 3
    for each in others:
        assert each.returncode == 0, each.output
        (first, text), (second, again) = each.result["errors"]
        assert first == "RuntimeError" and "PeerError: " in text  # as the backward pass has it
        assert second == "PeerError" and again in text
        assert each.result["seconds"] < 15  # sooner than the time-out
