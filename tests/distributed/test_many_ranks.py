"""More ranks than are all connected with each other: the same results, over few connections, and the same errors."""

import math
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_rank import attempt, digest, leave_alone, rank, values, world_size
from scenarios import report, run_ranks

from benchmarks.opening import Group
from ncz_plugins import Communicator
from ncz_plugins.core.schedules.halving import route_of, segments_for

RANKS = 33
LONG = 120.0  # the time-out of what must end before it
SOON = 60.0
ELEMENTS = 20_011
BOUND = 0.01
SUMS = ("ring", "direct", "halving")


def opened(store: dist.Store, **transport) -> Communicator:
    config = {
        "quantizer": {"mode": "abs", "value": BOUND},
        "transport": {"min_bytes": 0, "timeout_seconds": LONG, "link_gbps": 1, "hierarchy": "off", **transport},
    }
    return Communicator(config, Group(rank, world_size), store=store)


def sockets() -> int:
    """Open sockets of this process."""
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(each) and os.readlink(each).startswith("socket:") for each in descriptors)


def run_calls_and_die() -> None:
    """Every kind of call, then the last rank dies in one."""
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, rank == 0, timedelta(seconds=LONG), wait_for_workers=False)
    before, found = sockets(), {}
    communicators = {name: opened(dist.PrefixStore(name, store), schedule=name) for name in SUMS}
    opening = sockets() - before
    for name in ("halving", "ring", "direct"):
        tensor, before = values(rank, ELEMENTS), sockets()
        communicators[name].all_reduce(tensor)
        found[name] = {"digest": digest(tensor), "sockets": sockets() - before}
    exact = sum(values(each, ELEMENTS).double() for each in range(world_size))
    found["error"] = (tensor.double() - exact).abs().max().item()

    # What goes plain, small and large, and pieces; a message between two ranks that are not connected.
    halving = communicators["halving"]
    for numel in (10, 300_000):
        summed = torch.full((numel,), rank, dtype=torch.int64)
        halving.all_reduce(summed)
        assert (summed == sum(range(world_size))).all()
    pieces = torch.empty(world_size * 1000)
    halving.all_to_all_single(pieces, torch.full((world_size * 1000,), float(rank)))
    assert (pieces.view(world_size, -1) - torch.arange(world_size)[:, None]).abs().max() <= BOUND
    gathered = [torch.empty(ELEMENTS) for _ in range(world_size)] if rank == 0 else None
    communicators["ring"].gather(values(rank, ELEMENTS), gathered, 0)
    assert all((got - values(each, ELEMENTS)).abs().max() <= BOUND for each, got in enumerate(gathered or []))
    found["connected by gather"] = communicators["ring"].transport._connections.frames.ranks
    if rank in (3, 14):
        sent = torch.full((ELEMENTS,), 7.0)
        halving.send(sent, 14) if rank == 3 else halving.recv(sent.zero_(), 3)
        assert (sent - 7).abs().max() <= BOUND

    found |= {"opening": opening, "ranks": halving.transport._connections.neighbors.ranks}
    for name in SUMS:
        if rank == world_size - 1 and name == SUMS[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        wrong = attempt(lambda name=name: communicators[name].all_reduce(values(rank, ELEMENTS + (rank == 5))))
        found[f"{name} differs"] = wrong
    leave_alone(found)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Rank 0 serves the store, and the last rank dies."""
    return run_ranks(RANKS, run_calls_and_die, tmp_path_factory.mktemp("many"), seconds=200)


def results_of(finished) -> list[dict]:
    assert [each.returncode for each in finished] == [0] * (RANKS - 1) + [-signal.SIGKILL], report(finished)
    return [each.result for each in finished[:-1]]


def test_all_have_the_same_sum_by_every_schedule(finished):
    found = results_of(finished)
    assert {each[name]["digest"] for each in found for name in SUMS} == {found[0]["ring"]["digest"]}
    assert all(each["error"] <= RANKS * BOUND for each in found)


def peers_in_halving(number: int) -> set[int]:
    """Ranks that exchange frames with a rank in `halving.all_reduce`."""
    route = route_of(number, RANKS, segments_for(ELEMENTS, RANKS))
    return {leg.peer for leg in route.sums} | {peer for peers in route.sources.values() for peer in peers}


def test_a_rank_has_few_connections(finished):
    """Those of agreements from the start, with a socket to listen; those of a schedule with its first call."""
    rounds = math.ceil(math.log2(RANKS))
    for number, each in enumerate(results_of(finished)):
        assert len(each["ranks"]) <= 2 * rounds
        served = RANKS * (1 + len(SUMS)) if number == 0 else 0  # connections with the store: one of each communicator
        assert each["opening"] <= len(SUMS) * (2 * rounds + 2) + served
        assert each["ring"]["sockets"] == 2
        assert each["halving"]["sockets"] == len(peers_in_halving(number))
        assert each["direct"]["sockets"] == RANKS - 1
        of_gather = range(1, RANKS) if number == 0 else [0]
        assert {*each["connected by gather"]} == {(number + 1) % RANKS, (number - 1) % RANKS, *of_gather} - {number}


def test_ranks_that_differ_are_named(finished):
    for each in results_of(finished):
        for name in SUMS[:-1]:
            assert each[f"{name} differs"]["error"] == "MismatchError"
            assert "on rank 5" in each[f"{name} differs"]["message"]


def test_a_rank_that_died_is_named_by_all(finished):
    for each in results_of(finished):
        outcome = each[f"{SUMS[-1]} differs"]
        assert outcome["error"] == "PeerError" and outcome["seconds"] < SOON
        assert outcome["message"].startswith(f"rank {RANKS - 1} has closed its connections"), outcome
