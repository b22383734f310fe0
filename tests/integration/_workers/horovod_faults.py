"""Faults under Horovod, in reductions that follow one that worked.

usage: horovod_faults.py living|stopped|killed

Every rank that is left saves how its reductions failed, or what they gave.
"""

import os
import signal
import sys
import time
import warnings
from functools import partial

import horovod.torch as hvd
import torch
from horovod_common import hide_the_end_of_the_last_rank, own_values, save, sha256

import ncz_plugins.horovod
from ncz_plugins import NczError, kernels
from ncz_plugins.core.transport import handshake
from ncz_plugins.core.transport.mesh_stream import MeshStream
from ncz_plugins.horovod import NCZ, process_set
from ncz_plugins.horovod.transport import HorovodStream

SIZE = 300_000
SECONDS, LONG = 4.0, 120.0  # for what ends by time, and for what must end before
hide_the_end_of_the_last_rank()
hvd.init()
rank, last = hvd.rank(), hvd.size() - 1
processes = hvd.allgather(torch.tensor([os.getpid()])).tolist()
encode = kernels.cpu_backend().encode
results = {}


def compressor(schedule: str, seconds: float = LONG) -> NCZ:
    transport = {"schedule": schedule, "timeout_seconds": seconds, "min_bytes": 0}
    return NCZ(quantizer={"kind": "error_bound"}, transport=transport, entropy={"checksum": True})


def reduce(ncz: NCZ, size: int = SIZE) -> torch.Tensor:
    return ncz_plugins.horovod.allreduce(own_values(size), name="tensor", compression=ncz)


def attempt(call) -> dict | None:
    """How `call` fails; None if it does not."""
    started = time.monotonic()
    try:
        call()
    except (NczError, hvd.HorovodInternalError) as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return None


# ---------------------------------------------------------------- while all ranks live


def damaging(send):
    def damaging_send(stream, frame):
        damaged = frame.clone()
        damaged[-1] ^= 4
        send(stream, damaged)

    return damaging_send


def failing(*_):
    raise MemoryError("for this test")


def in_fork(call) -> str:
    """What comes of `call` in a fork of this process."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what this is about
        process = os.fork()
    if process == 0:
        os.write(writes, str((attempt(call) or {}).get("error")).encode())
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(process, os.WNOHANG)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.kill(process, signal.SIGKILL)
        return "hangs"
    return os.read(reads, 100).decode()


def living() -> None:
    ncz = compressor("direct")
    expected = reduce(ncz)
    results["size"] = attempt(lambda: reduce(ncz, SIZE - rank))
    results["config"] = attempt(lambda: reduce(NCZ(quantizer={"value": [0.25, 0.125][rank]})))
    process_set.__version__ = handshake.__version__ = ["0.1", "0.0"][rank]
    results["version"] = attempt(lambda: reduce(ncz))
    process_set.__version__ = handshake.__version__ = "0.1"
    results["fork"] = in_fork(lambda: reduce(ncz))

    on_ring = compressor("ring")
    exchange = MeshStream.exchange
    results["opened again"] = [sha256([reduce(on_ring)]) == sha256([expected])]
    if rank == last:
        MeshStream.exchange = damaging(exchange)
    results["flipped, ring"] = attempt(lambda: reduce(on_ring))
    MeshStream.exchange = exchange
    results["opened again"].append(sha256([reduce(on_ring)]) == sha256([expected]))
    if rank == last:
        kernels.cpu_backend().encode = failing
    results["out of memory, ring"] = attempt(lambda: reduce(on_ring))
    kernels.cpu_backend().encode = encode
    results["opened again"].append(sha256([reduce(on_ring)]) == sha256([expected]))

    if rank == last:
        hvd.init()  # of no effect in Horovod, so others need not call it
    results["initialized again"] = sha256([reduce(on_ring)]) == sha256([expected])

    if rank == last:
        HorovodStream.exchange = damaging(HorovodStream.exchange)
    results["flipped, direct"] = attempt(lambda: reduce(ncz))
    hvd.shutdown()  # as at the end of a process, which tells the others


# ---------------------------------------------------------------- one rank does not live on


def stop(*_) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # the signal is for the process: this thread may go on for a moment


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lost(schedule: str, misbehave, seconds: float = LONG) -> None:
    """Twice: a ring has a time-out of its own; all the rest goes by Horovod's."""
    ncz = compressor(schedule, seconds)
    reduce(ncz)
    if rank == last:
        kernels.cpu_backend().encode = misbehave
    results["lost"] = [attempt(partial(reduce, ncz)) for _ in range(2)]


{"living": living, "stopped": partial(lost, "ring", stop, SECONDS), "killed": partial(lost, "direct", die)}[
    sys.argv[1]
]()
save(results, rank)
if sys.argv[1] == "stopped" and rank == 0:
    os.kill(processes[last], signal.SIGKILL)
