"""Compressed gradients through hvd.DistributedOptimizer, beside Horovod's own in the same processes."""

import json

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

BOUND = 2e-4  # of each rank's contribution, in the gradients' own unit
CONFIG = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
# Two roundings of half a unit in the last place, one in either run, as a share of the value.
ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# What a case may set:
#   written: how the user writes `compression`; all ways mean the same configuration
#   arguments: of DistributedOptimizer; names for op and for the parameters in groups
#   unnamed: without named_parameters
#   dtype: of the model
#   branches: of the model, and in which order; one item per rank, taken in turn
WRITTEN = ["class", "instance", "file", "mapping", "sections"]
CASES = {
    **{f"written as {way}": {"written": way} for way in WRITTEN},
    **{dtype: {"dtype": dtype} for dtype in ("float64", "float16", "bfloat16")},
    "sum": {"arguments": {"op": "Sum"}},
    "predivided": {"arguments": {"gradient_predivide_factor": 3.0}},
    "two backward passes": {"arguments": {"backward_passes_per_step": 2}},
    "two groups": {"arguments": {"groups": 2}},
    "groups by name": {"arguments": {"groups": [["exit.bias", "a.weight"], ["entry.weight"]]}},
    "sum in groups": {"arguments": {"op": "Sum", "groups": 3}},
    "unnamed": {"unnamed": True},
    "another order on each rank": {"branches": ["ab", "ba"]},
    "a gradient that only some ranks have": {"branches": ["ab", "a"]},
    "a gradient that no rank has": {"branches": ["b"]},
    "groups in another order": {"arguments": {"groups": 2}, "branches": ["ab", "ba"]},
}
THREE_RANKS = [name for name in CASES if not name.startswith("written")]
ON_RING = ["sum in groups", "a gradient that only some ranks have", "bfloat16"]


def run(folder, names, ranks: int, schedule: str = "auto") -> list[dict]:
    config, cases = folder / "config.json", folder / "cases.json"
    config.write_text(json.dumps({**CONFIG, "transport": {**CONFIG["transport"], "schedule": schedule}}))
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    command = horovod_ranks(WORKERS / "horovod_optimizer.py", cases, config, ranks=ranks)
    outcome = launch(command, folder, timeout=120, environment={"NCZ_CONFIG": str(config)})
    assert len(outcome.ranks) == ranks
    return outcome.ranks


@pytest.fixture(scope="module")
def three_on_ring(tmp_path_factory):
    return run(tmp_path_factory.mktemp("three_on_ring"), ON_RING, ranks=3, schedule="ring")


LAUNCHES = {"two_ranks": CASES, "three_ranks": THREE_RANKS, "three_on_ring": ON_RING}


@pytest.fixture(params=[(fixture, name) for fixture, names in LAUNCHES.items() for name in names], ids="-".join)
def compared(request):
    """(the settings, what every rank found)"""
    fixture, name = request.param
    return CASES[name], [rank[name] for rank in request.getfixturevalue(fixture)]


def test_every_gradient_is_compressed(compared):
    _, ranks = compared
    for rank in ranks:
        assert len(rank["steps"]) == len(rank["errors"])
        for step in rank["steps"]:
            assert step["bypasses"] == {}
            assert step["compressed_calls"] == step["calls"] > 0
            assert step["bytes_in"] == rank["gradient_bytes"]
            assert step["wire_bytes"] < step["plain_bytes"]


def test_gradients_stay_within_the_bound(compared):
    settings, ranks = compared
    bound = BOUND * (len(ranks) if settings.get("arguments", {}).get("op") == "Sum" else 1)
    for rank in ranks:
        for error, magnitude in zip(rank["errors"], rank["magnitudes"]):
            assert 0 < error <= bound + ROUNDING[settings.get("dtype", "float32")] * magnitude
            assert magnitude > 10 * bound


def test_replicas_are_identical(compared):
    _, ranks = compared
    assert len({rank["sha256"] for rank in ranks}) == 1


def test_all_ways_to_write_it_mean_the_same(two_ranks):
    assert len({rank[f"written as {way}"]["sha256"] for rank in two_ranks for way in WRITTEN}) == 1


@pytest.mark.parametrize("name", ON_RING)
def test_the_ring_gives_the_same_to_the_bit(name, three_ranks, three_on_ring):
    assert [rank[name]["sha256"] for rank in three_on_ring] == [rank[name]["sha256"] for rank in three_ranks]


def test_ranks_really_had_their_gradients_in_another_order(two_ranks):
    for name in ("another order on each rank", "groups in another order"):
        first, second = (rank[name]["order"] for rank in two_ranks)
        assert first != second and sorted(first) == sorted(second)


def test_gradients_that_never_fired_really_did_not(two_ranks):
    first, second = (set(rank["a gradient that only some ranks have"]["order"]) for rank in two_ranks)
    assert first - second == {"b.weight", "b.bias"}
