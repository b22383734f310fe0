"""One rank misbehaves under Horovod. Elastic training and refusals have files of their own.

Frames of the schedule direct go through Horovod, those of ring and halving over connections of our own. What costs no
processes runs with halving as well. Of three ranks one stops while halving, and one is killed in direct; in
test_horovod_elastic.py one is killed while halving.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
from on_rank import attempt, raises, rank, start, world_size
from scenarios import HOROVOD, on_ranks, ranks, report, run_ranks
from under_horovod import own_values, sha256

import ncz_plugins.horovod
from ncz_plugins import FrameError, MismatchError, kernels
from ncz_plugins.core.transport import handshake
from ncz_plugins.core.transport.mesh_stream import MeshStream
from ncz_plugins.horovod import NCZ, process_set
from ncz_plugins.horovod.transport import HorovodStream

pytestmark = pytest.mark.slow

SIZE = 300_000
SOON = 60.0  # half of the time-out of what must end before it
SECONDS, LONG = 2.0, 120.0  # for what ends by time, and for what must end before
is_last = rank == world_size - 1
on_two_ranks = ranks(2, **HOROVOD)


def compressor(schedule: str, seconds: float = LONG) -> NCZ:
    transport = {"schedule": schedule, "timeout_seconds": seconds, "min_bytes": 0}
    return NCZ(quantizer={"kind": "error_bound"}, transport=transport, entropy={"checksum": True})


def reduce(ncz: NCZ, size: int = SIZE) -> torch.Tensor:
    return ncz_plugins.horovod.allreduce(own_values(size), name="tensor", compression=ncz)


def other_size(schedule: str) -> None:
    ncz = compressor(schedule)
    reduce(ncz)
    reduce(ncz, SIZE - rank)


def other_config() -> None:
    reduce(NCZ(quantizer={"value": [0.25, 0.125][rank]}))


def other_version() -> None:
    ncz, true = compressor("direct"), handshake.__version__
    reduce(ncz)
    process_set.__version__ = handshake.__version__ = ["0.1", "0.0"][rank]
    try:
        reduce(ncz)
    finally:
        process_set.__version__ = handshake.__version__ = true


DIFFERING = {
    "size": (partial(other_size, "direct"), "tensor: shape is [300000] on rank 0, [299999] on rank 1"),
    "size, halving": (partial(other_size, "halving"), "tensor: shape is [300000] on rank 0, [299999] on rank 1"),
    "config": (other_config, "quantizer.value is 0.25 on rank 0, 0.125 on rank 1"),
    "version": (other_version, 'version is "0.1" on rank 0, "0.0" on rank 1'),
}


@pytest.mark.parametrize("case", DIFFERING)
@on_two_ranks
def test_ranks_that_differ_are_refused(group, case):
    act, words = DIFFERING[case]
    raises(MismatchError, act, words)


def in_fork(call: Callable) -> str:
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


@pytest.mark.parametrize("schedule", ["direct", "halving"])
@on_two_ranks
def test_a_fork_gets_an_error_at_once(group, schedule):
    ncz = compressor(schedule)
    reduce(ncz)
    assert in_fork(lambda: reduce(ncz)) == "UnsupportedError"


# ------------------------------------------------------------------ a frame is damaged, or memory is missing


def damaging(send: Callable) -> Callable:
    def damaging_send(stream, *frames):
        *others, damaged = [frame.clone() for frame in frames]
        damaged[-1] ^= 4
        send(stream, *others, damaged)

    return damaging_send


def failing(*_):
    raise MemoryError("for this test")


@pytest.mark.parametrize("schedule", ["ring", "halving"])
@on_two_ranks
def test_connections_that_broke_are_opened_again(group, schedule):
    expected = sha256([reduce(compressor("direct"))])
    ncz, send, encode = compressor(schedule), MeshStream.send, kernels.cpu_backend().encode
    assert sha256([reduce(ncz)]) == expected

    # The last rank sends a damaged frame.
    if is_last:
        MeshStream.send = damaging(send)
    failed = attempt(lambda: reduce(ncz))
    MeshStream.send = send
    assert failed["error"] == ("HorovodInternalError" if is_last else "FrameError"), failed
    assert failed["seconds"] < SOON if is_last else "checksum" in failed["message"], failed
    assert sha256([reduce(ncz)]) == expected

    # It has no memory.
    if is_last:
        kernels.cpu_backend().encode = failing
    failed = attempt(lambda: reduce(ncz))
    kernels.cpu_backend().encode = encode
    assert failed["error"] == ("OutOfMemoryError" if is_last else "HorovodInternalError"), failed
    assert is_last or failed["seconds"] < SOON
    assert sha256([reduce(ncz)]) == expected


@pytest.mark.parametrize("schedule", ["ring", "halving"])
@on_two_ranks
def test_a_rank_may_initialize_horovod_again(group, schedule):
    ncz = compressor(schedule)
    expected = sha256([reduce(ncz)])
    if is_last:
        hvd.init()  # of no effect in Horovod, so others need not call it
    assert sha256([reduce(ncz)]) == expected


def send_a_damaged_frame() -> None:
    """With two ranks, which sum in one round, the last rank gets whole frames only, so its sum is right."""
    start()
    ncz = compressor("direct")
    reduce(ncz)
    if is_last:
        HorovodStream.exchange = damaging(HorovodStream.exchange)
        reduce(ncz)
    else:
        raises(FrameError, lambda: reduce(ncz), "checksum")
    hvd.shutdown()  # as at the end of a process, which tells the others


def test_a_damaged_frame_ends_the_reduction_where_it_arrives(tmp_path):
    on_ranks(2, send_a_damaged_frame, tmp_path, **HOROVOD)


# ------------------------------------------------------------------ a rank is lost


def stop(*_) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # the signal is for the process: this thread may go on for a moment


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_last_rank(case: str) -> list[dict]:
    """The last rank stops or dies in its second reduction. Returns how this rank's next two fail."""
    start()
    processes = hvd.allgather(torch.tensor([os.getpid()])).tolist()
    # Our own connections have a time-out of their own; all the rest goes by Horovod's.
    ncz = compressor("halving", SECONDS) if case == "stopped" else compressor("direct")
    reduce(ncz)
    if is_last:
        kernels.cpu_backend().encode = stop if case == "stopped" else die
    lost = [attempt(lambda: reduce(ncz)) for _ in range(2)]
    if rank == 0 and case == "stopped":
        os.kill(processes[-1], signal.SIGKILL)
    return lost


@pytest.mark.parametrize("case", ["killed", "stopped"])
def test_the_others_notice_a_rank_that_is_lost(case, tmp_path):
    how = HOROVOD | {"environment": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}}
    *others, last = finished = run_ranks(3, lose_the_last_rank, tmp_path, case, **how)
    assert last.returncode == -signal.SIGKILL, report(finished)
    for each in others:
        assert each.result is not None, report(finished)
        for error in each.result:
            assert error["error"] == "HorovodInternalError" and error["seconds"] < SOON, error
    if case == "stopped":  # who notices it first closes its connections, which the other may notice in turn
        assert any("transport.timeout_seconds" in each.result[0]["message"] for each in others)
