"""Two nodes with two ranks each, in network namespaces with a slow link between: found, right, and few bytes cross."""

import signal

import pytest
from links import needs_links
from processes import report, results, run_in_nodes

from benchmarks.laboratory.link import link

pytestmark = needs_links

SECONDS = 4.0  # the time-out that the worker for faults configures
SLACK = 15.0  # for a busy machine


def test_only_what_is_compressed_leaves_a_node(tmp_path):
    with link(2, "1gbit") as nodes:
        outcomes = results(run_in_nodes("hierarchy", 4, tmp_path, str(1 << 20), nodes=nodes))
        crossed = [node.bytes_sent() for node in nodes]
    assert all(outcome["nodes"] == [[0, 1], [2, 3]] and outcome["by memory"] for outcome in outcomes)
    for name in outcomes[0]["digests"]:
        if not name.startswith("reduce_scatter"):
            assert len({outcome["digests"][name] for outcome in outcomes}) == 1, name
    totals = [outcome["total"] for outcome in outcomes]
    for total in totals:
        assert total["compressed_calls"] == total["calls"] == 8 and not total["bypasses"]
        assert 3 * total["wire_bytes"] < total["plain_bytes"]
    # An agreement goes to neighbors as well, so not all that is counted need leave. Headers, acknowledgements and the
    # start come on top.
    counted, local = (sum(total[key] for total in totals) for key in ("wire_bytes", "local_bytes"))
    assert 0.9 * counted < sum(crossed) < 1.1 * counted + (1 << 20) < local / 2, (crossed, totals)


@pytest.mark.parametrize("case", ["killed", "left"])
def test_a_dead_rank_is_noticed_on_both_nodes(case, tmp_path):
    with link(2, "1gbit") as nodes:
        finished = run_in_nodes("faults_between_nodes", 4, tmp_path, case, seconds=90, nodes=nodes)
    assert finished[1].returncode == (-signal.SIGKILL if case == "killed" else 0), report(finished)
    for rank in (0, 2, 3):
        first, second = finished[rank].result
        assert first["error"] == second["error"] == "PeerError", report(finished)
        assert first["seconds"] < SECONDS + SLACK


def test_different_calls_are_refused_on_both_nodes(tmp_path):
    with link(2, "1gbit") as nodes:
        finished = run_in_nodes("faults_between_nodes", 4, tmp_path, "size", seconds=90, nodes=nodes)
    for outcome in finished:
        assert outcome.result[0]["error"] == "MismatchError", report(finished)
        assert "elements 1000000 on rank 0, 999999 on rank" in outcome.result[0]["message"]
