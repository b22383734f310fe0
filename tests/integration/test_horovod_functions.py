"""`allreduce` and its siblings for single tensors, beside Horovod's own; configured by NCZ_CONFIG alone."""

import json
import sys

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

BOUND = 2e-4
CONFIG = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
# Of a result or two, as a share of the largest value.
ROUNDING = {"torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}
FLOAT32 = 2.0**-22


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = horovod_ranks(WORKERS / "horovod_functions.py")
    outcome = launch(command, folder, timeout=120, environment={"NCZ_CONFIG": str(config)})
    assert len(outcome.ranks) == 2
    return outcome.ranks


def test_compressed_results_are_horovods_own_within_the_bound(ranks):
    for rank in ranks:
        for name, result in rank["compressed"].items():
            bound = BOUND * result["scale"] + ROUNDING.get(name, FLOAT32) * result["largest"]
            assert 0 < result["error"] <= bound, name
            assert result["compressed_calls"] == 1, name
            assert result["unchanged"] and result["dtypes"], name


def test_compressed_results_are_identical_on_all_ranks(ranks):
    for name, result in ranks[0]["compressed"].items():
        assert [rank["compressed"][name]["sha256"] for rank in ranks] == [result["sha256"]] * len(ranks), name


def test_what_goes_plain_is_exact_and_counted(ranks):
    for rank in ranks:
        for name, result in rank["plain"].items():
            assert result["exact"], name
            assert result["bypasses"] == {"dtype" if "int" in name else "reduce op": 1}, name


def test_without_loss_and_plain_they_are_horovods_own_to_the_bit(ranks):
    for rank in ranks:
        assert len(rank["exact"]) == 18
        assert [name for name, exact in rank["exact"].items() if not exact] == []


def test_a_fixed_rate(ranks):
    assert all(rank["fixed_rate"]["compressed_calls"] == 6 for rank in ranks)
    for name, result in ranks[0]["fixed_rate"]["cases"].items():
        # Half a step of each rank is the 254th part of a block's largest magnitude.
        assert 0 < result["error"] < 2 / 100, name
        assert [rank["fixed_rate"]["cases"][name]["sha256"] for rank in ranks] == [result["sha256"]] * len(ranks), name


def test_handles_can_be_waited_for_in_any_order_and_again(ranks):
    for rank in ranks:
        result = rank["handles"]
        assert result["before"] == [False] * 3 and result["after"] == [True] * 3
        assert result["polls"] == 2  # a loop that only polls must end
        assert 0 < result["error"] <= 1.01 * BOUND
        assert result["again"]
    assert len({rank["handles"]["sha256"] for rank in ranks}) == 1


def test_ranks_that_have_made_other_numbers_of_unnamed_calls_sum_the_same_ones(ranks):
    for rank in ranks:
        assert all(0 < error <= 1.01 * BOUND for error in rank["unnamed"]["errors"])


def test_gradients_flow_back(ranks):
    for rank in ranks:
        assert len(rank["backward"]) == 6
        for name, result in rank["backward"].items():
            times = (
                (2 if name.startswith("group") else 1) * (2 if "sum" in name else 1) / (8 if "factors" in name else 1)
            )
            assert 0 < result["error"] <= 1.01 * times * BOUND, name


def test_evaluation_in_inference_mode_can_average(ranks):
    for rank in ranks:
        assert all(0 < error <= 1.01 * BOUND for error in rank["inference"]["errors"])


def test_horovod_run_takes_an_instance_to_all_ranks(tmp_path):
    (found,) = launch([sys.executable, WORKERS / "horovod_run.py"], tmp_path, timeout=120).ranks
    (weights, compressed), other = found
    assert other == [weights, compressed] and len(weights) == 3 * 64 and compressed == 1


def test_the_default_dtype_of_the_program_changes_no_bit(ranks):
    for rank in ranks:
        assert rank["other_defaults"] == rank["other_defaults"][:1] * 3


def test_tensors_go_with_their_last_reference_also_those_of_failed_calls(ranks):
    assert [rank["kept"] for rank in ranks] == [{"success": 0, "failure": 0}] * 2
