"""Real processes over gloo: right, within the bound, and bit-identical on every rank."""

import pytest
from processes import results, run

from ncz_plugins.cli.report.read import read
from ncz_plugins.cli.report.summary import summarize
from ncz_plugins.cli.report.verdict import verdict


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_on_every_rank(world_size, tmp_path):
    outcomes = results(run("collectives", world_size, tmp_path, seconds=200))
    names = [name for name in outcomes[0] if not name.startswith("reduce_scatter")]
    assert len(names) > 60
    for name in names:
        assert len({outcome[name] for outcome in outcomes}) == 1, name


def test_every_collective_with_two_ranks_to_a_node(tmp_path):
    outcomes = results(run("collectives", 4, tmp_path, "cpu", "2", seconds=200))
    for name in outcomes[0]:
        if not name.startswith("reduce_scatter"):
            assert len({outcome[name] for outcome in outcomes}) == 1, name


@pytest.fixture(scope="module", params=[2, 3])
def behaviour(request, tmp_path_factory):
    return results(run("behaviour", request.param, tmp_path_factory.mktemp("behaviour")))


def test_bypasses_are_counted_by_reason(behaviour):
    for outcome in behaviour:
        assert outcome["early bypasses"] == {"dtype": 1, "too small": 3, "reduce op": 1, "role not enabled": 1}
        assert outcome["late bypasses"] == {"non-finite": 6}
        assert outcome["overflow"] == {"code overflow": 1}
        assert outcome["not worth it"] == {"not worth it": 1}


def test_stochastic_results_are_the_same_on_all_ranks(behaviour):
    assert all(outcome["stochastic"] == behaviour[0]["stochastic"] for outcome in behaviour)


def test_asynchronous_results_are_the_same_on_all_ranks(behaviour):
    assert all(outcome["async"] == behaviour[0]["async"] for outcome in behaviour)


def test_statistics_count_what_was_done(behaviour):
    for outcome in behaviour:
        counted = outcome["bytes"]
        assert counted["calls"] == counted["compressed_calls"] == 13
        assert counted["bytes_in"] == 4 * (sum(40_000 + i for i in range(12)) + 100_000)
        assert 0 < counted["wire_bytes"] < counted["plain_bytes"]
        assert counted["ratio"] == counted["plain_bytes"] / counted["wire_bytes"]
        assert counted["seconds"] >= counted["encode_seconds"] + counted["decode_seconds"] > 0


def test_rank_0_records_what_it_counted(behaviour):
    run = read(behaviour[0]["file"])
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6] and run.starts == [1, 4] and not run.notes
    for counted, step in zip(behaviour[0]["counted"], run.steps):
        recorded = step.model_dump()
        assert {name: recorded.get(name, value) for name, value in counted.items()} == counted
        assert step.ratio == counted["ratio"] and step.bypasses == {"too small": 1}
        assert step.plain_bytes > 2 * step.wire_bytes > 2 * step.bypassed_bytes["too small"]
    assert [[finding.name for finding in step.guard] for step in run.steps] == [["body"], []] * 3
    summary = summarize(run)
    assert summary.runs == 2 and summary.times.steps == 4 and 0 < summary.times.share < 1
    assert run.header.ranks == len(behaviour) and len(verdict(summary, run.header)) == 3


def test_nothing_leaks(behaviour):
    for outcome in behaviour:
        assert outcome["leaked"] == [0, 0]
