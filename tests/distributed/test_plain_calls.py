"""Calls that go plain: each check of the worker, on all ranks, is a test."""

import pytest
from processes import names, passed, results, run


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    return run("plain_calls", request.param, tmp_path_factory.mktemp("plain_calls"))


@pytest.mark.parametrize("name", names("plain_calls"))
def test_on_all_ranks(ranks, name):
    passed(ranks, name)


def test_all_checks_ran_and_all_ranks_ended_well(ranks):
    assert all(list(result) == names("plain_calls") for result in results(ranks))
