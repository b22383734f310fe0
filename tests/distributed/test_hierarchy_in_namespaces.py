"""Two nodes with two ranks each, in network namespaces with a slow link between: found, right, and few bytes cross."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from links import link, needs_links
from on_rank import attempt, digest, leave_alone, rank, start, values, world_size
from scenarios import on_ranks, report, run_ranks

from ncz_plugins import Communicator, kernels

pytestmark = needs_links

BOUND = 0.05
NUMEL = 1 << 20
SECONDS = 4.0  # the time-out of a call
SLACK = 15.0  # for a busy machine


def every_collective() -> dict:
    """What a rank found and sent, with a digest of each result that all ranks should have alike."""
    start()
    everyone = [values(r, NUMEL) for r in range(world_size)]
    exact = sum(tensor.double() for tensor in everyone)
    digests = {}

    def check(name: str, got: torch.Tensor, exact: torch.Tensor, addends: int = 1) -> None:
        error = (got.double() - exact).abs().max().item()
        assert error <= addends * BOUND + 1e-5, f"{name}: error {error}"
        digests[name] = digest(got)

    # The size is named, so that nothing is sent to measure the link.
    config = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": "128KiB", "link_gbps": 1}}
    with Communicator(config) as communicator:
        tensor = everyone[rank].clone()
        communicator.all_reduce(tensor)
        check("all_reduce", tensor, exact, world_size)

        tensor = everyone[rank].clone()
        communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait()
        check("average", tensor, exact / world_size)

        part = torch.empty(NUMEL // world_size)
        communicator.reduce_scatter_single(part, everyone[rank])
        check("reduce_scatter", part, exact[rank * len(part) :][: len(part)], world_size)

        gathered = torch.empty(NUMEL)
        parts = [tensor[: len(part)] for tensor in everyone]
        communicator.all_gather_single(gathered, parts[rank])
        check("all_gather", gathered, torch.cat(parts))

        for src in range(world_size):
            tensor = everyone[rank].clone()
            communicator.broadcast(tensor, src)
            check(f"broadcast from {src}", tensor, everyone[src])

        del digests["reduce_scatter"]
        return {
            "digests": digests,
            "nodes": communicator.nodes.ranks,
            "by memory": communicator.nodes.processes is not None,
            "total": communicator.stats.to_dict()["total"],
        }


def test_only_what_is_compressed_leaves_a_node(tmp_path):
    with link(2, "1gbit") as nodes:
        outcomes = on_ranks(4, every_collective, tmp_path, nodes=nodes)
        crossed = [node.bytes_sent() for node in nodes]
    assert all(outcome["nodes"] == [[0, 1], [2, 3]] and outcome["by memory"] for outcome in outcomes)
    assert all(outcome["digests"] == outcomes[0]["digests"] for outcome in outcomes)
    totals = [outcome["total"] for outcome in outcomes]
    for total in totals:
        assert total["compressed_calls"] == total["calls"] == 8 and not total["bypasses"]
        assert 3 * total["wire_bytes"] < total["plain_bytes"]
    # An agreement goes to neighbors as well, so not all that is counted need leave. Headers, acknowledgements and the
    # start come on top.
    counted, local = (sum(total[key] for total in totals) for key in ("wire_bytes", "local_bytes"))
    assert 0.9 * counted < sum(crossed) < 1.1 * counted + (1 << 20) < local / 2, (crossed, totals)


def sums_and_broadcasts(hierarchy: str) -> dict:
    """What was sent, with a digest of all results."""
    start()
    everyone = [values(r, NUMEL) for r in range(world_size)]
    exact, results = sum(tensor.double() for tensor in everyone), []
    transport = {"min_bytes": "128KiB", "link_gbps": 1, "hierarchy": hierarchy}
    with Communicator({"quantizer": {"mode": "abs", "value": BOUND}, "transport": transport}) as communicator:
        for src in range(world_size):
            results += [everyone[rank].clone(), everyone[rank].clone()]
            communicator.all_reduce(results[-2])
            communicator.broadcast(results[-1], src)
            assert (results[-2].double() - exact).abs().max() <= world_size * BOUND + 1e-5
            assert (results[-1] - everyone[src]).abs().max() <= BOUND
        nodes = communicator.nodes and communicator.nodes.ranks
        return {"digest": digest(torch.cat(results)), "nodes": nodes, "total": communicator.stats.to_dict()["total"]}


def test_nodes_of_three_two_and_one_ranks_send_less_than_ranks_by_themselves(tmp_path):
    crossed = {}
    for hierarchy in ("auto", "off"):
        with link(3, "1gbit") as (first, second, third):
            places = [first, second, first, second, first, third]
            outcomes = on_ranks(6, sums_and_broadcasts, tmp_path, hierarchy, nodes=places)
            crossed[hierarchy] = sum(node.bytes_sent() for node in (first, second, third))
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        nodes = [[0, 2, 4], [1, 3], [5]] if hierarchy == "auto" else None
        assert all(outcome["nodes"] == nodes for outcome in outcomes)
        totals = [outcome["total"] for outcome in outcomes]
        assert all(total["compressed_calls"] == total["calls"] == 12 for total in totals)
        if hierarchy == "auto":
            counted = sum(total["wire_bytes"] for total in totals)
            assert 0.9 * counted < crossed["auto"] < 1.1 * counted + (1 << 20), (crossed, totals)
    assert crossed["auto"] < 0.75 * crossed["off"]


def one_misbehaves(case: str) -> None:
    start()
    schedule = "direct" if case == "left" else "halving"  # between the nodes
    communicator = Communicator({"transport": {"timeout_seconds": SECONDS, "min_bytes": 0, "schedule": schedule}})
    tensor = values(rank, 1_000_000)
    communicator.all_reduce(tensor)  # one that works
    if rank == 1:
        if case == "killed":
            # In the middle: after the agreement, when the others wait for frames.
            kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        elif case == "left":
            leave_alone("left")
        elif case == "size":
            tensor = tensor[:-1]
    leave_alone([attempt(lambda: communicator.all_reduce(tensor)) for _ in range(2)])


@pytest.mark.parametrize("case", ["killed", "left"])
def test_a_dead_rank_is_noticed_on_both_nodes(case, tmp_path):
    with link(2, "1gbit") as nodes:
        finished = run_ranks(4, one_misbehaves, tmp_path, case, seconds=90, nodes=nodes)
    assert finished[1].returncode == (-signal.SIGKILL if case == "killed" else 0), report(finished)
    for each in (0, 2, 3):
        first, second = finished[each].result
        assert first["error"] == second["error"] == "PeerError", report(finished)
        assert first["seconds"] < SECONDS + SLACK


def test_different_calls_are_refused_on_both_nodes(tmp_path):
    with link(2, "1gbit") as nodes:
        finished = run_ranks(4, one_misbehaves, tmp_path, "size", seconds=90, nodes=nodes)
    for outcome in finished:
        assert outcome.result[0]["error"] == "MismatchError", report(finished)
        assert "elements 1000000 on rank 0, 999999 on rank" in outcome.result[0]["message"]
