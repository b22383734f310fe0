"""One rank misbehaves: every other raises a typed error that says what is wrong, and nothing hangs.

Four ranks do so in ring and direct, then five and more than are all connected with each other while halving. What
goes wrong inside a node does so before anything travels between nodes, so it is tested with one schedule. Ranks that
are refused at the start, or whose calls go plain, have none.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_rank import (
    attempt,
    be_silent,
    device,
    leave,
    leave_alone,
    others_have_left_results,
    rank,
    start,
    values,
    world_size,
)
from scenarios import DEVICES, report, run_ranks

import ncz_plugins.core.transport.handshake as handshake
from ncz_plugins import Communicator, kernels
from ncz_plugins.core.transport import mesh
from ncz_plugins.core.transport import process_memory as memory

SOON = 60.0  # for a busy machine; half of the time-out of what must end before it
LONG = 120.0  # the time-out of what must end before it


# ------------------------------------------------------------------ one case after another in four processes

on_gpu = device.type == "cuda"
SECONDS = 30.0 if on_gpu else 2.0  # for what ends by time; ranks come late where NCCL connects and kernels are compiled
backend = kernels.cuda_backend() if on_gpu else kernels.cpu_backend()
encode_sums = backend.encode_sums
outcomes = {}  # of this rank, by case


def settings(seconds: float, **transport) -> dict:
    return {"transport": {"timeout_seconds": seconds, "min_bytes": 0, "link_gbps": 1, **transport}}


def refused_at_the_start(case: str, config: dict, culprit: int = 1, **disguise) -> None:
    """Rank `culprit` opens its communicator with this configuration, or pretends to be of another version."""
    true = {name: getattr(handshake, name) for name in disguise}
    if rank == culprit:
        vars(handshake).update(disguise)
    outcomes[case] = attempt(lambda: Communicator(settings(LONG) | (config if rank == culprit else {})))
    vars(handshake).update(true)
    dist.barrier()


def call(communicator: Communicator, collective: str, tensor: torch.Tensor) -> None:
    """A call of all ranks with this tensor. The last rank is the root of a broadcast."""
    n = communicator.world_size
    match collective:
        case "all_reduce":
            communicator.all_reduce(tensor)
        case "reduce_scatter_single":
            communicator.reduce_scatter_single(torch.empty_like(tensor), tensor.repeat(n))
        case "all_gather_single":
            communicator.all_gather_single(tensor.repeat(n), tensor)
        case "broadcast":
            communicator.broadcast(tensor, n - 1)


def broken(
    case: str,
    group,
    config: dict,
    misbehave,
    elements: int = 300_000,
    at_first: bool = False,
    collective: str = "all_reduce",
) -> None:
    """After one call, unless `at_first`, the last rank of a group misbehaves; two more calls fail."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    communicator = Communicator(config, group)
    tensor = values(rank, elements).to(device)
    if not at_first:
        call(communicator, collective, tensor)
    if rank == dist.get_world_size(group) - 1:
        tensor = misbehave(communicator, tensor)
        tensor = values(rank, elements).to(device) if tensor is None else tensor
    outcomes[case] = [attempt(lambda: call(communicator, collective, tensor)) for _ in range(2)]
    if on_gpu:
        torch.cuda.synchronize()  # nothing waits there any more
    leave(outcomes)
    backend.encode_sums = encode_sums


# What the last rank does, each with the communicator and the tensor of the call that is to fail.
def damage(communicator, tensor) -> None:
    def damaging(sums, *arguments):
        sizes = encode_sums(sums, *arguments)
        for each in sums:
            if not each.frames:
                each.out[4] += 1  # the version
        return sizes

    backend.encode_sums = damaging


def fail(communicator, tensor) -> None:
    def failing(*_):
        raise MemoryError("for this test")

    backend.encode_sums = failing


def die(communicator, tensor) -> None:
    # After the agreement, when the others wait for frames.
    backend.encode_sums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def die_before_neighbors_have_read(communicator, tensor) -> None:
    memory.read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def stop(communicator, tensor) -> None:
    def stopping(*_):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # the signal is for the process: this thread may go on for a moment

    backend.encode_sums = stopping


MISMATCHES = {
    "size": lambda communicator, tensor: tensor[:-1],
    "dtype": lambda communicator, tensor: tensor.bfloat16(),
    "order": lambda communicator, tensor: communicator.broadcast(tensor, 0, async_op=True) and None,
}


def misbehave_in_turn() -> None:
    """The last cases cost a process each, so that fewer and fewer take part."""
    start()
    groups = {n: dist.new_group(list(range(n))) for n in (4, 3, 2)}
    without_2 = dist.new_group([0, 1, 3])
    processes: list[int] = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    refused_at_the_start("config", {"quantizer": {"value": 0.125}})
    refused_at_the_start("version", {}, __version__="0.0.0")
    refused_at_the_start("frame version", {}, VERSION=99)
    if rank in (0, 3):  # and 1 does not come
        outcomes["absent"] = attempt(lambda: Communicator(settings(SECONDS), without_2))
    dist.barrier()
    faults = {"damaged on the ring": damage, "damaged, direct": damage, "out of memory": fail}
    for case, misbehave in (MISMATCHES | faults).items():
        schedule = "ring" if case == "damaged on the ring" else "direct"
        broken(case, groups[4], settings(LONG, schedule=schedule), misbehave)
        dist.barrier()
    if on_gpu:  # others are about to connect theirs, and NCCL would wait without a limit
        broken("another device", groups[4], settings(LONG), lambda communicator, tensor: tensor.cpu(), at_first=True)
        dist.barrier()
    in_a_node = die if on_gpu else die_before_neighbors_have_read  # GPUs don't read each other's memory
    between_nodes = "auto" if on_gpu else "halving"
    broken("killed in a node", groups[4], settings(LONG, hierarchy=2, schedule=between_nodes), in_a_node)
    broken("stopped", groups[3], settings(SECONDS, schedule="ring"), stop)
    if rank == 0:
        os.kill(processes[2], signal.SIGKILL)
    broken("killed", groups[2], settings(LONG), die)
    leave_alone(outcomes)


@pytest.fixture(scope="module", params=DEVICES)
def finished(request, tmp_path_factory):
    return run_ranks(4, misbehave_in_turn, tmp_path_factory.mktemp("faults"), device=request.param, seconds=240)


def outcomes_of(case: str, finished, ranks) -> list:
    for each in ranks:
        assert finished[each].result is not None and case in finished[each].result, report(finished)
    return [finished[each].result[case] for each in ranks]


def check_broken(outcome, kinds: set[str]) -> None:
    first, second = outcome
    assert first["error"] in kinds, first
    assert first["seconds"] < SOON, first
    assert second["error"] == first["error"] and second["seconds"] < 1, second


OTHER_COLLECTIVES = {
    f"out of memory in {name}": name for name in ("reduce_scatter_single", "all_gather_single", "broadcast")
}


def misbehave_while_halving() -> None:
    """The same in a schedule in which each rank hears from few others."""
    start()
    groups = {n: dist.new_group(list(range(n))) for n in (world_size, world_size - 1)}
    processes: list[int] = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    halving = {"schedule": "halving", "hierarchy": "off"}
    for case, misbehave in (MISMATCHES | {"damaged": damage, "out of memory": fail}).items():
        broken(case, groups[world_size], settings(LONG, **halving), misbehave)
        dist.barrier()
    for case, name in OTHER_COLLECTIVES.items():
        broken(case, groups[world_size], settings(LONG, **halving), fail, 30_000, collective=name)
        dist.barrier()
    seconds = SECONDS if world_size <= mesh.MOST_RANKS else 3 * SECONDS  # many ranks take turns on few cores
    broken("stopped", groups[world_size], settings(seconds, **halving), stop)
    if rank == 0:
        os.kill(processes[-1], signal.SIGKILL)
    broken("killed", groups[world_size - 1], settings(LONG, **halving), die)
    leave_alone(outcomes)


@pytest.fixture(scope="module", params=[5, mesh.MOST_RANKS + 2], ids=["all connected", "few connected"])
def halved(request, tmp_path_factory):
    return run_ranks(request.param, misbehave_while_halving, tmp_path_factory.mktemp("halving"), seconds=240)


@pytest.mark.parametrize("case", ["size", "dtype", "order"])
def test_ranks_that_differ_are_named_while_halving(case, halved):
    last = len(halved) - 1
    for outcome in outcomes_of(case, halved, range(len(halved))):
        check_broken(outcome, {"MismatchError"})
        assert f"on rank {last}" in outcome[0]["message"]


@pytest.mark.parametrize("case", ["damaged", "out of memory", *OTHER_COLLECTIVES, "stopped", "killed"])
def test_all_ranks_hear_of_what_happens_while_halving(case, halved):
    last = len(halved) - (2 if case == "killed" else 1)
    others = outcomes_of(case, halved, range(last))
    for outcome in others:
        check_broken(outcome, {"FrameError", "PeerError"} if case == "damaged" else {"PeerError"})
        # Where all are connected with each other, a rank may name one that gave up because of another.
        if len(halved) > mesh.MOST_RANKS and case != "damaged":
            assert outcome[0]["message"].startswith(f"rank {last} has "), outcome
    if case == "damaged":
        assert "FrameError" in [outcome[0]["error"] for outcome in others]


def test_all_ends(finished):
    assert [f.returncode for f in finished] == [0, *[-signal.SIGKILL] * 3], report(finished)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("config", ["quantizer.value is", "0.375 on ranks 0, 2, 3", "0.125 on rank 1"]),
        ("version", ["version", '"0.0.0" on rank 1']),
        ("frame version", ["frame version is 1 on ranks 0, 2, 3, 99 on rank 1"]),
    ],
)
def test_ranks_that_differ_are_refused_at_the_start(case, words, finished):
    for outcome in outcomes_of(case, finished, range(4)):
        assert outcome["error"] == "MismatchError", report(finished)
        assert all(word in outcome["message"] for word in words), outcome["message"]
        assert outcome["seconds"] < SOON


def test_a_rank_that_does_not_come_is_named(finished):
    for outcome in outcomes_of("absent", finished, [0, 3]):
        assert outcome["error"] == "PeerError" and "rank 1 did not say within" in outcome["message"], outcome
        assert outcome["seconds"] < SOON


@pytest.mark.parametrize(
    ("case", "words"),
    [("size", "elements"), ("dtype", "dtype"), ("order", "collective")],
)
def test_different_calls_are_refused_on_every_rank(case, words, finished):
    for outcome in outcomes_of(case, finished, range(4)):
        check_broken(outcome, {"MismatchError"})
        assert f"{words} " in outcome[0]["message"] and "on rank 3" in outcome[0]["message"]


def test_a_rank_that_does_not_connect_its_gpu_is_told(finished, request):
    if "cuda" not in request.node.callspec.id:
        pytest.skip("is about GPUs")
    for outcome in outcomes_of("another device", finished, range(4)):
        check_broken(outcome, {"MismatchError"})
        assert "connecting GPUs" in outcome[0]["message"] and "on rank 3" in outcome[0]["message"]


@pytest.mark.parametrize("case", ["damaged on the ring", "damaged, direct"])
def test_damage_breaks_the_communicator_on_every_rank_at_once(case, finished):
    found = outcomes_of(case, finished, range(4))
    assert "FrameError" in [outcome[0]["error"] for outcome in found]
    for outcome in found:
        # Before the time-out, with all processes alive: those who saw the damage closed the connections.
        check_broken(outcome, {"FrameError", "PeerError"})
    assert any("version" in outcome[0]["message"] for outcome in found)


def test_a_rank_without_memory_says_so_and_the_others_hear_of_it(finished):
    *others, last = outcomes_of("out of memory", finished, range(4))
    check_broken(last, {"OutOfMemoryError"})
    for outcome in others:
        check_broken(outcome, {"PeerError"})


@pytest.mark.parametrize(("case", "size"), [("killed in a node", 4), ("stopped", 3), ("killed", 2)])
def test_a_dead_or_silent_peer_is_noticed(case, size, finished):
    for outcome in outcomes_of(case, finished, range(size - 1)):
        check_broken(outcome, {"PeerError"})
        assert "look at its log" in outcome[0]["message"]


# ------------------------------------------------------------------ calls that go plain

TIMEOUT = 1.5  # seconds, of what ends by time
SIZES = {"small": 1000, "large": 400_000}


def opened(seconds: float) -> Communicator:
    communicator = Communicator({"transport": {"timeout_seconds": seconds}})
    communicator.all_reduce(torch.ones(1000))
    return communicator


def reduced(communicator: Communicator, elements: int) -> None:
    communicator.all_reduce(torch.ones(elements), role="parameter")  # not enabled, so it goes plain


def failures(communicator: Communicator, elements: int) -> list[dict | None]:
    return [attempt(partial(reduced, communicator, elements)) for _ in range(2)]


def fall_silent_and_die_beside_plain_calls(most_ranks: int) -> None:
    """The last rank does, while the others make calls that go plain, small and large ones."""
    mesh.MOST_RANKS = most_ranks
    start()
    last = rank == world_size - 1
    cases = {f"silent, {name}": (opened(TIMEOUT), elements) for name, elements in SIZES.items()}
    if not last:
        with ThreadPoolExecutor(len(cases)) as pool:  # all wait at the same time
            outcomes.update(zip(cases, pool.map(failures, *zip(*cases.values()))))
    if last:
        be_silent(others_have_left_results, 4 * TIMEOUT)
    else:
        leave(outcomes)  # which the last rank waits for
    cases = {f"dead, {name}": (opened(LONG), elements) for name, elements in SIZES.items()}
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    for case, (communicator, elements) in cases.items():
        outcomes[case] = failures(communicator, elements)
    leave_alone(outcomes)


@pytest.fixture(scope="module", params=[16, 2], ids=["all connected", "few connected"])
def plain(request, tmp_path_factory):
    return run_ranks(3, fall_silent_and_die_beside_plain_calls, tmp_path_factory.mktemp("plain"), request.param)


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_silent_peer_is_noticed_by_our_time_out(plain, size):
    for outcome in outcomes_of(f"silent, {size}", plain, range(2)):
        check_broken(outcome, {"PeerError"})
        assert "look at its log" in outcome[0]["message"]


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_dead_peer_at_once(plain, size):
    for outcome in outcomes_of(f"dead, {size}", plain, range(2)):
        check_broken(outcome, {"PeerError"})
