"""hvd.DistributedOptimizer where other settings alone do not lead: see the worker."""

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

BOUND = 2e-4  # as the worker has it
ROUNDING = 2.0**-22  # of sums that two runs add in another order, as a share of the largest value
COMPRESSED_ONCE = {"calls": 1, "compressed": 1, "bypasses": {}}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launch(horovod_ranks(WORKERS / "horovod_edges.py"), tmp_path_factory.mktemp("two_ranks"), timeout=120).ranks


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    command = horovod_ranks(WORKERS / "horovod_edges.py", ranks=3)
    return launch(command, tmp_path_factory.mktemp("three_ranks"), timeout=120).ranks


@pytest.fixture(params=["two_ranks", "three_ranks"])
def ranks(request):
    return request.getfixturevalue(request.param)


def identical(results) -> bool:
    return len({result["sha256"] for result in results}) == 1


@pytest.mark.parametrize("name", ["sparse", "sparse as dense"])
def test_sparse_gradients_stay_sparse_and_the_others_are_compressed(name, ranks):
    for rank in ranks:
        result = rank[name]
        assert result["is_sparse"]
        assert result["counts"] == [COMPRESSED_ONCE]
        assert 0 < result["error"] <= BOUND + ROUNDING * result["largest"]
        if name == "sparse":
            assert result["embedding_error"] == 0
            assert result["bytes_in"] == result["other_bytes"]
        else:
            assert 0 < result["embedding_error"] <= BOUND + ROUNDING * result["largest"]
            assert result["bytes_in"] == result["other_bytes"] + result["embedding_bytes"]
    assert identical(rank[name] for rank in ranks)


def test_what_is_not_finite_comes_out_where_it_was_on_every_rank(ranks):
    for rank in ranks:
        result = rank["not finite"]
        assert result["places"] == result["expected_places"]
        assert all(result["same_kind"])
        assert result["error"] <= ROUNDING * result["largest"]
        assert result["counts"] == [{"calls": 1, "compressed": 0, "bypasses": {"non-finite": 1}}, COMPRESSED_ONCE]


def test_the_transport_reduces_uncompressed_and_agrees(ranks):
    n = len(ranks)
    total = n * (n + 1) / 2
    for rank in ranks:
        result = rank["transport"]
        for name, expected in {"sum": total, "average": total / n, "maximum": n}.items():
            for dtype in ("float32", "bfloat16"):
                assert result[f"{name} torch.{dtype}"] == [expected]
        assert result["scaled"] == [total / 2]
        assert result["highest"] == [n, -1]
        broadcast, ring, message = result["refused"]
        assert "no broadcast" in broadcast and "direct schedule only" in ring and "only be exchanged" in message


def test_a_model_below_min_bytes_goes_plain_and_counted(ranks):
    for rank in ranks:
        result = rank["tiny"]
        assert result["counts"] == [{"calls": 1, "compressed": 0, "bypasses": {"too small": 1}}]
        assert result["error"] <= ROUNDING * result["largest"]


def test_gradients_stay_in_a_buffer_that_the_program_keeps_them_in(ranks):
    for rank in ranks:
        assert len(rank["buffers"]) >= 8 and not any(rank["buffers"].values()), rank["buffers"]


def test_sums_are_off_by_what_is_kept_and_nothing_else_where_gradients_are_skipped(ranks):
    for rank in ranks:
        assert len(rank["fed back"]) == 6
        for name, found in rank["fed back"].items():
            assert found["kept"], name
            assert found["off"] > 0.05, (name, found)
            assert found["unexplained"] < 1e-5, (name, found)
            assert found["moved"] == 0, (name, found)


def test_gradients_can_be_clipped_between_synchronize_and_step(ranks):
    for rank in ranks:
        assert rank["clipping"]["norms"] == pytest.approx([0.01] * 3, rel=1e-3)
        assert rank["clipping"]["counts"] == [COMPRESSED_ONCE] * 3
    assert identical(rank["clipping"] for rank in ranks)


def test_restoring_the_optimizer_forgets_what_was_pending(ranks):
    for rank in ranks:
        assert 0 < rank["restored"]["error"] <= 1.01 * BOUND
        assert rank["restored"]["counts"] == [COMPRESSED_ONCE]
    assert identical(rank["restored"] for rank in ranks)


def test_the_configuration_can_change_between_steps(ranks):
    for rank in ranks:
        result = rank["schedule"]
        for bound, error in zip(result["bounds"], result["errors"]):
            assert bound / 10 < error <= bound + ROUNDING * result["largest"]
        assert result["ratios"] == sorted(result["ratios"], reverse=True)
        assert "quantizer.value: -1 is not allowed" in result["refused"]
        assert result["kept"]


def test_two_optimizers_can_share_one_ncz(ranks):
    for rank in ranks:
        assert 0 < rank["two optimizers"]["error"] <= 1.01 * BOUND
        assert rank["two optimizers"]["counts"] == [COMPRESSED_ONCE] * 2
    assert identical(rank["two optimizers"] for rank in ranks)


def test_the_first_group_of_parameters_can_be_empty(ranks):
    assert [rank["empty first group"]["counts"] for rank in ranks] == [[COMPRESSED_ONCE]] * len(ranks)
    assert identical(rank["empty first group"] for rank in ranks)


def test_a_copy_of_a_model_with_a_frozen_layer_can_train_all_of_it(ranks):
    for rank in ranks:
        first, *others = rank["unfrozen"]["bytes_in"]
        assert 0 < first < rank["unfrozen"]["all_bytes"]
        assert others == [rank["unfrozen"]["all_bytes"]] * 2
    assert identical(rank["unfrozen"] for rank in ranks)


def test_a_metric_can_be_averaged_before_the_optimizer_synchronizes(ranks):
    for rank in ranks:
        assert rank["average of a metric"]["error"] <= 1.01 * BOUND
    assert identical(rank["average of a metric"] for rank in ranks)


def test_while_a_rank_has_joined_the_others_reduce_plain_and_then_all_go_on_compressed(ranks):
    first, *others = (rank["join"] for rank in ranks)
    assert first["exact"] == [] and first["bypasses"] == {} and first["compressed"] == 1
    for other in others:
        assert other["exact"] == [True, True]
        assert other["bypasses"] == {"a rank has joined": 2} and other["compressed"] == 1
    assert len({rank["join"]["last"] for rank in ranks}) == 1


def test_while_a_rank_has_joined_gradients_are_not_reduced_early(ranks):
    first, *others = (rank["joined before the optimizer"] for rank in ranks)
    assert first["counts"] == [COMPRESSED_ONCE] * 2
    for other in others:
        assert other["errors"][0] <= ROUNDING * other["largest"]
        joined = {"calls": 1, "compressed": 0, "bypasses": {"a rank has joined": 1}}
        assert other["counts"] == [COMPRESSED_ONCE, COMPRESSED_ONCE, joined]


def test_a_group_may_be_complete_in_one_step_and_not_in_another(ranks):
    for rank in ranks:
        assert all(0 < error <= 1.01 * BOUND for error in rank["incomplete groups"]["errors"])
        assert rank["incomplete groups"]["counts"] == [COMPRESSED_ONCE] * 3
    assert identical(rank["incomplete groups"] for rank in ranks)


class TestProcessSets:
    @pytest.fixture(autouse=True)
    def found(self, three_ranks):
        self.ranks = [rank["process sets"] for rank in three_ranks]

    @pytest.mark.parametrize("name", ["optimizer", "optimizer with groups"])
    def test_the_optimizer_reduces_over_its_own(self, name):
        results = [rank[name] for rank in self.ranks]
        assert [result["included"] for result in results] == [True, False, True]
        for result in (results[0], results[2]):
            assert result["compressed_calls"] == 1
            assert 0 < result["error"] <= 1.01 * BOUND
        assert results[1]["compressed_calls"] == 0
        assert results[0]["sha256"] == results[2]["sha256"] != results[1]["sha256"]

    def test_overlapping_sets_started_in_another_order(self):
        for name, members in {"0 2": [0, 2], "0 1": [0, 1], "1 2": [1, 2]}.items():
            results = [rank["overlapping"].get(name) for rank in self.ranks]
            assert [i for i, result in enumerate(results) if result] == members
            for i in members:
                assert 0 < results[i]["error"] <= 2.01 * BOUND  # a sum of two
            assert identical(results[i] for i in members)

    @pytest.mark.parametrize("kind", ["ring", "group"])
    def test_averages_over_each(self, kind):
        for name, members in {"0 2": [0, 2], "0 1": [0, 1], "1 2": [1, 2]}.items():
            results = [self.ranks[i][kind][name] for i in members]
            assert all(0 < result["error"] <= 1.01 * BOUND for result in results)
            assert identical(results)

    def test_error_feedback_tells_them_apart(self):
        for i, sets in enumerate([["0 1", "0 2"], ["0 1", "1 2"], ["0 2", "1 2"]]):
            assert self.ranks[i]["kept"] == [f"allreduce/ranks {name}/same" for name in sets]

    def test_a_new_set_that_gets_the_number_of_a_removed_one(self):
        results = [rank["reused"] for rank in self.ranks]
        assert all(result["number"] for result in results)
        assert [0 < result["error"] <= 1.01 * BOUND for result in results[:2]] == [True, True]
        assert identical(results[:2])

    def test_a_set_of_one_rank(self):
        assert [rank["alone"]["included"] for rank in self.ranks] == [False, True, False]
        assert self.ranks[1]["alone"]["exact"]
        assert self.ranks[1]["alone"]["counts"] == {"calls": 1, "compressed": 0, "bypasses": {"one rank": 1}}
