"""A run that is stopped and resumed by new processes, by the ways that the guides show for PyTorch.

Those of the frameworks are tested where these are: tests/integration, and the programs of the pages in tests/docs.
"""

import pytest
from processes import results, run

WAYS = ["torch.save", "dcp.save", "dcp.async_save"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of the run that was not stopped found after it had saved, and those of the resumed ones."""
    folder = tmp_path_factory.mktemp("checkpoints")
    imports = "ncz_plugins.torch.ddp,ncz_plugins.torch.fsdp,torch._dynamo,torch.distributed.checkpoint"
    return [results(run("checkpoints", 2, folder, job, str(folder), imports=imports)) for job in ("save", "resume")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Communicator", "DDP", "FSDP2"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(runs, name, way):
    for whole, resumed in zip(*runs):
        if name == "FSDP2" and f"{name}, save" not in whole:
            pytest.skip("needs torch 2.9")
        assert resumed[f"{name}, {way}"] == whole[f"{name}, save"]


def test_each_rank_has_a_state_of_its_own_that_changes_with_each_step(runs):
    """Else the test above would pass with the state of another rank, or of none."""
    for first, second in zip(*(rank.values() for rank in runs[0])):
        assert len({*(str(step["kept"]) for step in first + second)}) == len(first + second) == 6
        assert [step["step"] for step in first] == [4, 5, 6]
        assert first[-1]["tightening"] < first[0]["tightening"] < 1
