"""Non-finite gradients, `no_sync`, other default dtypes, no optimizer, and collectives of the user's own."""

import math

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

WITH_OVERFLOW_CHECK = ["bf16 stage 2", "bf16 stage 3"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(deepspeed_ranks(WORKERS / "edges.py"), tmp_path_factory.mktemp("edges"), timeout=120).ranks


@pytest.mark.parametrize("case", ["fp32", *WITH_OVERFLOW_CHECK])
class TestNonFiniteGradients:
    def test_come_out_on_every_rank_where_they_were_and_nowhere_else(self, case, ranks):
        for rank in ranks:
            assert rank[case]["not_finite"] == rank[case]["expected_not_finite"] != []

    def test_that_reduction_is_the_plain_one_and_counted(self, case, ranks):
        for rank in ranks:
            assert all(rank[case]["gradients_as_plain"])
            assert rank[case]["compressed"]["steps"][0]["bypasses"] == {"non-finite": 1}

    def test_training_goes_on_as_in_the_plain_run(self, case, ranks):
        for rank in ranks:
            compressed, plain = rank[case]["compressed"], rank[case]["plain"]
            assert compressed["skipped"] == plain["skipped"]
            assert compressed["losses"] == pytest.approx(plain["losses"], rel=0.05, nan_ok=True)
        assert len({rank[case]["compressed"]["sha256"] for rank in ranks}) == 1


@pytest.mark.parametrize("case", WITH_OVERFLOW_CHECK)
def test_the_overflow_check_sees_them_and_compression_resumes(case, ranks):
    for rank in ranks:
        compressed = rank[case]["compressed"]
        assert compressed["skipped"] == 1
        assert all(map(math.isfinite, compressed["losses"]))
        for step in compressed["steps"][1:]:
            assert step["bypasses"] == {}
            assert step["compressed_calls"] == 1


def test_a_collective_of_the_users_own_is_exact(ranks):
    for rank in ranks:
        result = rank["own collective"]
        assert result["exact"]
        assert result["calls_after"] == result["calls_before"] > 0


def test_no_sync_reduces_once_compressed(ranks):
    for rank in ranks:
        assert rank["no_sync"]["calls"] == [0, 1]
        assert rank["no_sync"]["compressed_calls"] == 1
    assert len({rank["no_sync"]["sha256"] for rank in ranks}) == 1


def test_the_default_dtype_of_the_program_changes_no_bit(ranks):
    for rank in ranks:
        for stage, sha256 in rank["other defaults"].items():
            assert sha256 == sha256[:1] * 3, stage


def test_an_engine_without_an_optimizer_gathers_weights_without_loss(ranks):
    for rank in ranks:
        plain, sent = rank["without optimizer"]["gathered"]
        assert 0 < sent < plain
        assert rank["without optimizer"]["losses"][0] == rank["without optimizer"]["losses"][1]
