"""What carries no NCZ is left alone: Horovod's documented behaviours, with the plugin imported and without."""

from pathlib import Path

import pytest
from launch import horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

PROGRAM = Path(__file__).with_name("plain_horovod.py")


def run(folder, plugin: str) -> list[dict[str, str]]:
    """A hash of each result on each rank."""
    command = horovod_ranks(PROGRAM, plugin, imports="horovod.torch,torch._dynamo")
    first, second = launch(command, folder, timeout=120).ranks
    return [first, second]


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory):
    return run(tmp_path_factory.mktemp("without"), "without")


def test_every_result_is_the_same_to_the_bit(without_plugin, tmp_path):
    assert run(tmp_path, "with") == without_plugin


def test_the_results_say_something(without_plugin):
    """Other compressions give other weights, and ranks agree where they should."""
    first, second = without_plugin
    trained = [name for name in first if name.startswith("optimizer")]
    assert len({first[name] for name in trained}) >= 4  # predividing by 2 is exact
    assert [second[name] for name in trained] == [first[name] for name in trained]
    assert first["alltoall"] != second["alltoall"]
