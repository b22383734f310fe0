"""Births and deaths: forks, process groups that end and begin again, a hundred times, and memory that runs out."""

import gc
import os
import resource
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from common import digest, leave, start, values

from ncz_plugins import Communicator, NczError
from ncz_plugins.cli.perf.launch import free_port

WARMUP, CYCLES = 10, 100
MiB = 1 << 20
rank, world_size = start()
result = {}


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


def forks() -> dict:
    communicator = Communicator({"quantizer": {"kind": "error_bound"}, "transport": {"timeout_seconds": 60}})
    tensor = values(rank, 100_000)
    communicator.all_reduce(tensor)
    found = {
        "large": in_fork(lambda: communicator.all_reduce(values(rank, 100_000))),
        "small": in_fork(lambda: communicator.all_reduce(values(rank, 10))),
        "close": in_fork(communicator.close),
    }
    again = values(rank, 100_000)
    communicator.all_reduce(again)  # the parent's goes on
    communicator.close()
    return found | {"parent": torch.equal(tensor, again)}


# ---------------------------------------------------------------- a hundred lives


def held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return {"files": files, "threads": threads, "memory": resident}


def cycle(port: int) -> str:
    """A process group from its beginning to its end, and a communicator in it."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with Communicator() as communicator:
        tensor = values(rank, 100_000)
        communicator.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return digest(tensor)


def lives(ports: list[int]) -> dict:
    dist.destroy_process_group()
    digests = {cycle(port) for port in ports[:WARMUP]}
    before = held()
    digests |= {cycle(port) for port in ports[WARMUP:]}
    after = held()
    return {"more": {name: after[name] - before[name] for name in before}, "results": len(digests)}


# ---------------------------------------------------------------- descriptors and threads


def held_by_each() -> list[dict[str, int]]:
    """What each of three communicators holds, used as much as they may be. In the end all of them are closed."""
    found, communicators = [], []
    for _ in range(3):
        before = held()
        communicators.append(Communicator())
        for numel in (10, 100_000, 4_000_000):
            communicators[-1].all_reduce(values(rank, numel), async_op=True).wait()
            communicators[-1].all_reduce(torch.ones(numel, dtype=torch.int64))
        after = held()
        found.append({name: after[name] - before[name] for name in ("files", "threads")})
    for communicator in communicators:
        communicator.close()
    return found


def left_by_dropping() -> dict[str, int]:
    """What twenty communicators leave that nobody closed, where Python collects no garbage."""
    before = held()
    gc.disable()
    for _ in range(20):
        communicator = Communicator()
        communicator.all_reduce(values(rank, 100_000), async_op=True).get_future().wait()
        del communicator
    deadline = time.monotonic() + 20  # threads end by themselves, soon
    while len(os.listdir("/proc/self/task")) > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    gc.enable()
    return {"files": files - before["files"], "threads": threads - before["threads"]}


def short_of_descriptors(which: str) -> dict:
    """What comes of a communicator where the last rank, or each, may open two descriptors, and of the next one."""
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if which == "all" or rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limits[1]))
    started = time.monotonic()
    found = attempt(Communicator)
    seconds = time.monotonic() - started
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return {"found": found, "seconds": seconds, "next": attempt(Communicator)}


# ---------------------------------------------------------------- no memory


def out_of_memory(megabytes: float) -> str:
    """An all-reduce with so little memory left on the last rank, in large frames."""
    config = {"transport": {"timeout_seconds": 60, "frame_bytes": "64MiB"}, "quantizer": {"kind": "lossless"}}
    communicator = Communicator(config)
    tensor = values(rank, 16 * MiB)
    communicator.all_reduce(tensor[:100_000])  # now all threads run
    dist.barrier()
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
    dist.barrier()
    return found


ports = [[free_port() for _ in range(WARMUP + CYCLES)]]
dist.broadcast_object_list(ports)
result["forks"] = forks()
result["each"] = held_by_each()
result["dropped"] = left_by_dropping()
result["short of descriptors"] = {which: short_of_descriptors(which) for which in ("last", "all")}
result["out of memory"] = [out_of_memory(megabytes) for megabytes in (1, 8)]
after = values(rank, 100_000)
with Communicator() as communicator:
    communicator.all_reduce(after)
result["after"] = digest(after)
result["lives"] = lives(*ports)
leave(result)
