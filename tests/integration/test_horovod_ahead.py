"""Gradients that are reduced while others are computed: see the worker. All cases take the same steps."""

import json

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

STEPS = 4
SOON = 60.0
# Of what the ranks exchange, only the order in time differs: each must give what a step gives that runs nothing ahead.
SAME = [
    "ahead",
    "as it comes",
    "on the ring",
    "a metric beside",
    "another process set",
    "two models",
    "dropped",
    "dropped in part",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    command = horovod_ranks(WORKERS / "horovod_ahead.py", "living", ranks=3)
    return launch(command, tmp_path_factory.mktemp("ahead"), timeout=200).ranks


def test_all_is_reduced_before_it_is_waited_for_from_the_second_step_on(ranks):
    for rank in ranks:
        (before, first), *others = rank["ahead"]["calls"]
        assert before == 0 and first > 2
        assert others == [[first * step, first * step] for step in range(2, STEPS + 1)]


def test_nothing_is_where_optimizers_share_a_compressor(ranks):
    for rank in ranks:
        found = rank["never ahead"]["calls"]
        assert [before for before, _ in found] == [0, *(after for _, after in found[:-1])]


def test_ranks_that_name_parameters_in_other_orders_sum_the_same_ones(ranks):
    found = [rank["named in other orders"] for rank in ranks]
    assert {each["sha256"] for each in found} == {found[0]["sha256"]}
    assert all(each["apart"] < 1e-4 for each in found), found  # buckets of other sizes have other quantization steps


@pytest.mark.parametrize("case", SAME)
def test_the_bits_do_not_depend_on_when_gradients_are_reduced(case, ranks):
    assert {rank[case]["sha256"] for rank in ranks} == {ranks[0]["never ahead"]["sha256"]}
    assert [rank[case]["step"] for rank in ranks] == [STEPS] * len(ranks)


def test_nor_on_which_gradients_a_rank_has(ranks):
    case = "a gradient that only some ranks have"
    assert len({rank[each]["sha256"] for rank in ranks for each in (case, f"{case}, never ahead")}) == 1


def test_nor_on_the_order_in_which_ranks_have_them(ranks):
    assert len({rank["another order on each rank"]["sha256"] for rank in ranks}) == 1


def test_ranks_that_differ_are_refused_when_they_wait_and_can_go_on(ranks):
    for rank in ranks:
        kind, message = rank["differing"]["error"]
        assert kind == "MismatchError" and "quantizer.value is 0.25 on rank" in message
    assert len({rank["differing"]["sha256"] for rank in ranks}) == 1


def test_the_others_notice_a_rank_that_dies_while_they_compute(tmp_path):
    command = horovod_ranks(WORKERS / "horovod_ahead.py", "killed", ranks=3)
    launch(command, tmp_path, timeout=200, fails=True, environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"})
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["error"] and found["seconds"] < SOON
