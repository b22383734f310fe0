"""Hugging Face under DeepSpeed: the Trainer with ZeRO 1, 2 and 3, saved and resumed, and a loop of Accelerate.

tests/docs runs both under DistributedDataParallel.
"""

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ENVIRONMENT = {"ACCELERATE_USE_DEEPSPEED": "true", "HF_HUB_OFFLINE": "1"}  # the first is what `accelerate launch` sets
STAGES = ["1", "2", "3"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    command = deepspeed_ranks(WORKERS / "trainer.py", *STAGES, imports="ncz_plugins.deepspeed,transformers")
    return launch(command, tmp_path_factory.mktemp("trainer"), timeout=250, environment=ENVIRONMENT).ranks


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_compressed(ranks, stage):
    for rank in ranks:
        total = rank[stage]["whole"]["total"]
        assert total["compressed_calls"] == total["calls"] > 0 and total["ratio"] > 3
        assert rank[stage]["whole"]["step"] == 4
        assert all(loss < 1.5 for loss in rank[stage]["whole"]["losses"])


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_are_identical(ranks, stage):
    assert len({rank[stage]["whole"]["sha256"] for rank in ranks}) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks, stage):
    for rank in ranks:
        whole, stopped, resumed = (rank[stage][name] for name in ("whole", "stopped", "resumed"))
        assert resumed["sha256"] == whole["sha256"] != stopped["sha256"]
        assert resumed["losses"] == whole["losses"]
        assert (stopped["step"], resumed["step"]) == (2, 4)


def test_a_loop_of_accelerate_with_a_deepspeed_plugin(tmp_path):
    command = deepspeed_ranks(WORKERS / "accelerate_loop.py", imports="ncz_plugins.deepspeed,accelerate")
    ranks = launch(command, tmp_path, timeout=100, environment=ENVIRONMENT).ranks
    assert len({rank["sha256"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["steps"] == 3
        assert rank["total"]["compressed_calls"] == rank["total"]["calls"] > 0 and rank["total"]["ratio"] > 3
