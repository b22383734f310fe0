"""One rank misbehaves; every other must raise the right error soon. One case after another, in four processes.

The last cases cost a process each, so that fewer and fewer take part.

faults.py [cpu | cuda]
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from common import attempt, leave, start, values

import ncz_plugins.core.transport.handshake as handshake
from ncz_plugins import Communicator, kernels
from ncz_plugins.core.transport import process_memory as memory

device = torch.device(*sys.argv[1:2] or ["cpu"])
on_gpu = device.type == "cuda"
SECONDS = 30.0 if on_gpu else 4.0  # for what ends by time; ranks come late where NCCL connects and kernels are compiled
LONG = 120.0  # for what must end before
rank, world_size = start(device)
groups = {n: dist.new_group(list(range(n))) for n in (4, 3, 2)}
without_2 = dist.new_group([0, 1, 3])
processes: list[int] = [None] * world_size
dist.all_gather_object(processes, os.getpid())
backend = kernels.cuda_backend() if on_gpu else kernels.cpu_backend()
encode_sums = backend.encode_sums
outcomes = {}


def settings(seconds: float, **transport) -> dict:
    return {"transport": {"timeout_seconds": seconds, "min_bytes": 0, **transport}}


def refused_at_the_start(case: str, config: dict, culprit: int = 1, **disguise) -> None:
    """Rank `culprit` opens its communicator with this configuration, or pretends to be of another version."""
    true = {name: getattr(handshake, name) for name in disguise}
    if rank == culprit:
        vars(handshake).update(disguise)
    outcomes[case] = attempt(lambda: Communicator(settings(LONG) | (config if rank == culprit else {})))
    vars(handshake).update(true)
    dist.barrier()


def broken(case: str, size: int, config: dict, misbehave, elements: int = 300_000, at_first: bool = False) -> None:
    """After one call, unless `at_first`, the last rank of the first `size` misbehaves; two more calls fail."""
    if rank >= size:
        return
    communicator = Communicator(config, groups[size])
    tensor = values(rank, elements).to(device)
    if not at_first:
        communicator.all_reduce(tensor)
    if rank == size - 1:
        tensor = misbehave(communicator, tensor)
        tensor = values(rank, elements).to(device) if tensor is None else tensor
    outcomes[case] = [attempt(lambda: communicator.all_reduce(tensor)) for _ in range(2)]
    if on_gpu:
        torch.cuda.synchronize()  # nothing waits there any more
    leave(outcomes)
    backend.encode_sums = encode_sums


def absent() -> None:
    """One rank does not come."""
    if rank in (0, 3):
        outcomes["absent"] = attempt(lambda: Communicator(settings(SECONDS), without_2))
    dist.barrier()


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


refused_at_the_start("config", {"quantizer": {"value": 0.125}})
refused_at_the_start("version", {}, __version__="0.0.0")
refused_at_the_start("frame version", {}, VERSION=99)
absent()
for case, misbehave in {
    "size": lambda communicator, tensor: tensor[:-1],
    "dtype": lambda communicator, tensor: tensor.bfloat16(),
    "order": lambda communicator, tensor: communicator.broadcast(tensor, 0, async_op=True) and None,
    "damaged on the ring": damage,
    "damaged, direct": damage,
    "out of memory": fail,
}.items():
    schedule = "ring" if case == "damaged on the ring" else "direct"
    broken(case, 4, settings(LONG, schedule=schedule), misbehave)
    dist.barrier()
if on_gpu:  # others are about to connect theirs, and NCCL would wait without a limit
    broken("another device", 4, settings(LONG), lambda communicator, tensor: tensor.cpu(), at_first=True)
    dist.barrier()
in_a_node = die if on_gpu else die_before_neighbors_have_read  # GPUs don't read each other's memory
broken("killed in a node", 4, settings(LONG, hierarchy=2), in_a_node)
broken("stopped", 3, settings(SECONDS, schedule="ring"), stop)
if rank == 0:
    os.kill(processes[2], signal.SIGKILL)
broken("killed", 2, settings(LONG), die)
leave(outcomes)
os._exit(0)  # the default group is not to be trusted any more
