"""Forks, process groups that end and begin again, and what runs out: errors instead of hangs, and no leaks.

Where several communicators or calls are made anyway, some halve, and the others have the schedule of two ranks, direct.
"""

import gc
import os
import resource
import time
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_rank import digest, rank, same_on_all_ranks, values, world_size
from scenarios import on_ranks, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import Communicator, NczError
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.transport import mesh
from ncz_plugins.torch import ddp

SCHEDULES = ("direct", "halving")
SOON = 20.0  # seconds; the time-out is half an hour
WARMUP, CYCLES = 10, 100
MiB = 1 << 20
# Large blocks come from the system and go back to it, so that what is held shows, and a limit is felt.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
two_ranks = ranks(2, environment=ENVIRONMENT)


def attempt(call) -> str:
    try:
        call()
    except NczError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


# ---------------------------------------------------------------- forks


def in_fork(call) -> str:
    """What comes of `call` in a fork of this process; it hangs if there is no answer in time."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what this is about
        process = os.fork()
    if process == 0:
        os.write(writes, attempt(call).encode())
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(process, os.WNOHANG)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.kill(process, 9)
        os.waitpid(process, 0)
        return "hangs"
    os.close(writes)
    with os.fdopen(reads) as answer:
        return answer.read()


@two_ranks
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fork_gets_an_error_at_once_and_its_parent_goes_on(group, schedule):
    config = {"quantizer": {"kind": "error_bound"}, "transport": {"timeout_seconds": 60, "schedule": schedule}}
    with Communicator(config, group) as communicator:
        tensor = values(rank, 100_000)
        communicator.all_reduce(tensor)
        for numel in (100_000, 10):
            found = in_fork(lambda numel=numel: communicator.all_reduce(values(rank, numel)))
            assert found.startswith("UnsupportedError") and "is a fork of process" in found, found
        assert in_fork(communicator.close) == "fine"
        again = values(rank, 100_000)
        communicator.all_reduce(again)  # the parent's goes on
        assert torch.equal(tensor, again)


# ---------------------------------------------------------------- descriptors and threads


def held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return {"files": files, "threads": threads, "memory": resident}


def wait_for_threads(before: dict[str, int]) -> None:
    """Threads end by themselves, soon."""
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)


@two_ranks
def test_a_communicator_takes_four_descriptors_with_one_peer_and_three_threads(group):
    """A mesh of each kind, gloo's connection, and one with the store, which rank 0 serves.

    The first one may take what gloo listens with as well: four descriptors and a thread.
    """
    communicators, served = [], world_size if rank == 0 else 0
    for schedule, extra_files, extra_threads in (("direct", 4, 1), ("ring", 0, 0), ("halving", 0, 0)):
        before = held()
        communicators.append(Communicator({"transport": {"schedule": schedule}}, group))
        for numel in (10, 100_000, 4_000_000):
            communicators[-1].all_reduce(values(rank, numel), async_op=True).wait()
            communicators[-1].all_reduce(torch.ones(numel, dtype=torch.int64))
        more = {name: number - before[name] for name, number in held().items()}
        assert more["files"] <= 4 + extra_files + served and more["threads"] <= 3 + extra_threads, more
    for communicator in communicators:
        communicator.close()


@two_ranks
def test_a_hundred_models_under_ddp_take_a_fifth_of_the_usual_descriptors(group):
    """Each takes two, and three threads: one makes its calls, one decodes, one completes futures."""
    models = [DistributedDataParallel(nn.Linear(64, 64), process_group=group) for _ in range(100)]
    before, served = held(), world_size if rank == 0 else 0  # connections with the store
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        compressed = [ddp.compress(model, {"transport": {"min_bytes": 0, "link_gbps": 1}}) for model in models]
        for model in models:
            model(values(rank, 64)).sum().backward()
        more = {name: number - before[name] for name, number in held().items()}
    finally:  # other tests use this process
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert more["files"] <= 2 * len(models) + 1 + served and more["threads"] <= 3 * len(models), more
    assert all(each.stats.total.compressed_calls > 0 for each in compressed)
    for each in compressed:
        each.close()


@two_ranks
def test_communicators_that_are_dropped_leave_nothing_behind_without_a_collection_of_garbage(group):
    before = held()
    gc.disable()
    for schedule in 10 * SCHEDULES:
        communicator = Communicator({"transport": {"schedule": schedule}}, group)
        communicator.all_reduce(values(rank, 100_000), async_op=True).get_future().wait()
        del communicator
    wait_for_threads(before)
    files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    gc.enable()
    assert files <= before["files"] and threads <= before["threads"], (files, threads, before)


@two_ranks
@pytest.mark.parametrize("which", ["last", "all"])
def test_a_rank_that_may_open_too_few_descriptors_says_so_and_the_others_hear_of_it(group, which):
    dist.barrier(group)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    short = which == "all" or rank == world_size - 1
    if short:  # of which two are left
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limits[1]))
    started = time.monotonic()
    found = attempt(partial(Communicator, group=group))
    seconds = time.monotonic() - started
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if short:
        assert found.startswith("UnsupportedError: connecting 2 ranks takes up to "), found
        assert "run `ulimit -n " in found
    else:
        assert found.startswith("PeerError: rank 1 of 2 can't go on: connecting 2 ranks takes up to "), found
    assert seconds < SOON
    assert attempt(partial(Communicator, group=group)) == "fine"


@two_ranks
def test_a_rank_that_may_open_too_few_for_its_first_halving_says_so_and_the_others_hear_of_it(group):
    """Many ranks connect for frames when a schedule needs them."""
    with patch.object(mesh, "MOST_RANKS", 1):
        communicator = Communicator({"transport": {"schedule": "halving", "min_bytes": 0}}, group)
    dist.barrier(group)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
    found = attempt(partial(communicator.all_reduce, values(rank, 100_000)))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if rank == world_size - 1:
        assert found.startswith("UnsupportedError: connecting 2 ranks takes up to "), found
        assert "run `ulimit -n " in found
    else:
        assert found.startswith("PeerError: rank 1 has failed: UnsupportedError('connecting 2 ranks takes up"), found


# ---------------------------------------------------------------- no memory


@two_ranks
def test_a_rank_without_memory_for_frames_says_so_and_the_others_hear_of_it(group):
    found = [out_of_memory(*case, group) for case in ((1, "direct"), (1, "halving"), (8, "direct"))]
    found_by_all = [None] * world_size
    dist.all_gather_object(found_by_all, found, group)
    others, last = found_by_all
    assert any(each.startswith("OutOfMemoryError") for each in last), last
    for other, each in zip(others, last):
        assert each == "fine" or each.startswith("OutOfMemoryError"), each
        assert (other == "fine") == (each == "fine") and (other == "fine" or other.startswith("PeerError")), other
    after = values(rank, 100_000)
    with Communicator(group=group) as communicator:
        communicator.all_reduce(after)
    same_on_all_ranks(digest(after), group)


def out_of_memory(megabytes: float, schedule: str, group) -> str:
    """An all-reduce with so little memory left on the last rank, in large frames."""
    transport = {"timeout_seconds": 60, "frame_bytes": "64MiB", "schedule": schedule}
    config = {"transport": transport, "quantizer": {"kind": "lossless"}}
    communicator = Communicator(config, group)
    tensor = values(rank, 16 * MiB)
    communicator.all_reduce(tensor[:100_000])  # now all threads run
    dist.barrier(group)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == world_size - 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(megabytes * MiB), limits[1]))
    found = attempt(partial(communicator.all_reduce, tensor))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    communicator.close()
    del communicator, tensor
    gc.collect()
    dist.barrier(group)
    return found


# ---------------------------------------------------------------- a hundred lives


def cycle(store: dist.Store, schedule: str) -> str:
    """A process group from its beginning to its end, and a communicator in it. That which halves measures no link."""
    transport = {"schedule": schedule, "min_bytes": 0, "link_gbps": 1 if schedule == "halving" else None}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with Communicator({"transport": transport}) as communicator:
        tensor = values(rank, 100_000)
        communicator.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return digest(tensor)


def live_a_hundred_times(port: int) -> dict:
    """What this rank holds after that more than before, and how many different results it got."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)  # one, as it takes longer than all else of a life
    lives = [(dist.PrefixStore(f"{n}", store), SCHEDULES[n % 2]) for n in range(WARMUP + CYCLES)]
    digests = {cycle(*life) for life in lives[:WARMUP]}
    before = held()
    digests |= {cycle(*life) for life in lives[WARMUP:]}
    wait_for_threads(before)
    after = held()
    return {"more": {name: after[name] - before[name] for name in before}, "results": len(digests)}


def test_a_hundred_process_groups_and_communicators_leave_nothing_behind(tmp_path):
    for found in on_ranks(2, live_a_hundred_times, tmp_path, free_port(), environment=ENVIRONMENT):
        assert found["results"] == 1
        assert found["more"]["files"] <= 0 and found["more"]["threads"] <= 0, found
        assert found["more"]["memory"] < 16 << 20, found  # 160 KiB each, of which one result has 400
