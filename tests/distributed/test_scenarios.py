"""Tests that ranks run, and scenarios: each failure is reported where it belongs, whatever a rank does."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from on_rank import rank, same_on_all_ranks, start, world_size
from scenarios import Batch, Ranks, on_ranks, ranks, run_ranks

# ------------------------------------------------------------------ tests that share their processes


@ranks(2, 3)
@pytest.mark.parametrize("addend", [1, 2.5])
def test_every_rank_runs_a_test_with_a_group_and_arguments(group, addend):
    total = torch.full((3,), addend * (rank + 1))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [addend * sum(range(1, world_size + 1))] * 3


@ranks(2)
def test_each_test_has_a_group_of_its_own(group):
    assert group is not dist.group.WORLD and world_size == dist.get_world_size(group) == 2
    same_on_all_ranks(dist.get_world_size(), group)


def passes(group):
    dist.all_reduce(torch.zeros(1), group=group)


def fails_on_rank_1(group):
    assert rank != 1, "as it should"


def kills_rank_1(group):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs_on_rank_1(group):
    while rank == 1:
        time.sleep(1)


def batch(folder, *functions, seconds: float = 100) -> Batch:
    names = [function.__name__ for function in functions]
    return Batch(
        __file__, Ranks(2, seconds=seconds), {f"{at} {name}": (name, {}) for at, name in enumerate(names)}, folder
    )


def test_a_failure_hides_no_other_test(tmp_path):
    of_three = batch(tmp_path, passes, fails_on_rank_1, passes)
    of_three.check("0 passes")
    of_three.check("2 passes")
    with pytest.raises(pytest.fail.Exception, match="--- rank 1\nTraceback(.|\n)*as it should") as failure:
        of_three.check("1 fails_on_rank_1")
    assert "rank 0" not in str(failure.value)


def test_a_rank_that_dies_fails_what_it_did_not_end(tmp_path):
    of_three = batch(tmp_path, passes, kills_rank_1, passes)
    of_three.check("0 passes")
    for name in ("1 kills_rank_1", "2 passes"):
        with pytest.raises(pytest.fail.Exception, match="did not end on rank 1.\n--- rank 1 exited with -9"):
            of_three.check(name)


def test_a_rank_that_hangs_is_killed_and_says_where_it_was(tmp_path):
    of_two = batch(tmp_path, hangs_on_rank_1, passes, seconds=5)
    with pytest.raises(pytest.fail.Exception, match="rank 1 was still running(.|\n)*in hangs_on_rank_1"):
        of_two.check("0 hangs_on_rank_1")
    with pytest.raises(pytest.fail.Exception, match="did not end on rank 0(.|\n)*did not end on rank 1"):
        of_two.check("1 passes")


# ------------------------------------------------------------------ scenarios


def two_of_three_die(how: str) -> list:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise ValueError(f"dies {how}")
    return [rank, world_size, how]


def test_results_exits_and_tracebacks_of_a_scenario(tmp_path):
    first, second, third = run_ranks(3, two_of_three_die, tmp_path, "so")
    assert (first.returncode, first.result) == (0, [0, 3, "so"])
    assert (second.returncode, second.result) == (-signal.SIGKILL, None)
    assert third.returncode == 1 and "in two_of_three_die" in third.output and "ValueError: dies so" in third.output
    with pytest.raises(AssertionError, match="rank 0 exited with 0\n(.|\n)*exited with -9\n(.|\n)*ValueError: dies so"):
        on_ranks(3, two_of_three_die, tmp_path, "so")


def one_hangs() -> None:
    start()
    if rank == 1:
        time.sleep(600)


def test_a_scenario_that_hangs_is_ended(tmp_path):
    with pytest.raises(AssertionError, match="not done within 5 s:(.|\n)*rank 1 was still running(.|\n)*in one_hangs"):
        run_ranks(2, one_hangs, tmp_path, seconds=5)
