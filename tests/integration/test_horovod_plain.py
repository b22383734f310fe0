"""What carries no NCZ is left alone: Horovod's documented behaviours, with the plugin imported and without."""

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]


def run(tmp_path_factory, plugin: str) -> list[dict]:
    command = horovod_ranks(WORKERS / "horovod_plain.py", plugin, imports="horovod.torch")
    return launch(command, tmp_path_factory.mktemp(plugin), timeout=120).ranks


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory):
    return run(tmp_path_factory, "without")


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory):
    return run(tmp_path_factory, "with")


def test_the_runs_were_as_meant(without_plugin, with_plugin):
    assert [rank["plugin_imported"] for rank in without_plugin] == [False, False]
    assert [rank["plugin_imported"] for rank in with_plugin] == [True, True]


def test_every_result_is_the_same_to_the_bit(without_plugin, with_plugin):
    for without, with_it in zip(without_plugin, with_plugin):
        assert with_it["results"] == without["results"]


def test_the_results_say_something(without_plugin):
    """Other compressions give other weights, and ranks agree where they should."""
    first, second = (rank["results"] for rank in without_plugin)
    trained = [name for name in first if name.startswith("optimizer")]
    assert len({first[name] for name in trained}) >= 4  # predividing by 2 is exact
    assert [second[name] for name in trained] == [first[name] for name in trained]
    assert first["alltoall"] != second["alltoall"]
