"""One rank misbehaves under DeepSpeed. Refusals at the start are in tests/integration."""

import os
import signal
import time

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
import torch.distributed as dist
from on_rank import attempt, leave, leave_alone, rank, start, world_size
from scenarios import DEEPSPEED, report, run_ranks
from small_engine import configuration, engine_of

import ncz_plugins.deepspeed  # noqa: F401
from ncz_plugins import kernels
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.transport.mesh_stream import MeshStream

pytestmark = pytest.mark.slow
SECONDS, LONG = 2.0, 120.0  # time-outs of what ends by time, and of what must end before
SOON = 60.0
encode, send = kernels.cpu_backend().encode, MeshStream.send
outcomes = {}  # of this rank, by case
transport = {"min_bytes": 0}


def engine(seconds: float = LONG, stage: int = 2, **top_level):
    key = {"transport": transport | {"timeout_seconds": seconds}, "entropy": {"checksum": True}}
    return engine_of(configuration(stage, key, **top_level))


def step(engine, number: int, scale: float = 1.0, layers: slice = slice(None)) -> float:
    """One training step on this rank's own batch, through some layers only. Returns the loss."""
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    dtype = next(engine.module.parameters()).dtype
    engine.train()
    output = torch.randn(4, 31, generator=random).to(dtype)
    for layer in engine.module[layers]:
        output = layer(output)
    loss = output.float().square().mean() * scale
    engine.backward(loss)
    engine.step()
    return loss.item()


def broken(case: str, misbehave, seconds: float = LONG, **how) -> None:
    """A step that works, one in which the last rank misbehaves, and one more."""
    trained = engine(seconds)
    step(trained, 0)
    if dist.get_rank() == dist.get_world_size() - 1:
        misbehave()
    else:
        how = {}
    outcomes[case] = [attempt(lambda number=number: step(trained, number, **how)) for number in (1, 2)]
    kernels.cpu_backend().encode, MeshStream.send = encode, send
    leave(outcomes)


def flip_a_bit() -> None:
    def damaging_send(stream, frame):
        damaged = frame.clone()
        damaged[-1] ^= 4
        send(stream, damaged)

    MeshStream.send = damaging_send


def fail() -> None:
    def failing(*_):
        raise MemoryError("for this test")

    kernels.cpu_backend().encode = failing


def stop() -> None:
    def stopping(*_):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # the signal is for the process: this thread may go on for a moment

    kernels.cpu_backend().encode = stopping


def die() -> None:
    kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def overflow(stage: int) -> dict:
    """fp16 with a loss scaler, where one rank's gradients are too large for the first scale."""
    # DeepSpeed asks the accelerator, which says no for want of fast kernels; torch computes float16 on any CPU.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    scaler = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "min_loss_scale": 1}
    trained = engine(stage=stage, fp16=scaler)
    found = []
    for number in range(4):
        before = torch.cat([p.detach().float().view(-1) for p in trained.module.parameters()]) if stage < 3 else None
        step(trained, number, scale=1e6 if number == 1 and rank == 1 else 1.0)
        after = torch.cat([p.detach().float().view(-1) for p in trained.module.parameters()]) if stage < 3 else None
        counted = trained.communication_compression.stats.steps[-1]
        found.append(
            {
                "skipped": trained.skipped_steps,
                "scale": trained.optimizer.cur_scale,
                "unchanged": stage < 3 and torch.equal(before, after),
                "bypasses": dict(counted.bypasses),
                "compressed": counted.compressed_calls,
            }
        )
    trained.destroy()
    return found


def begin_again(size: int, port: int) -> None:
    """Leave the process group, and join one of the first `size` ranks; the others end."""
    if rank >= size:
        os._exit(0)
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    os.environ["WORLD_SIZE"] = str(size)
    deepspeed.init_distributed("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)


def misbehave_in_turn(schedule: str) -> None:
    """One case after another in three processes. The last two cases cost one each."""
    transport["schedule"] = schedule
    start()
    processes: list[int] = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    outcomes["overflow"] = {str(stage): overflow(stage) for stage in (2, 3)}
    leave(outcomes)
    broken("size", lambda: None, layers=slice(0, 1))
    broken("flipped", flip_a_bit)
    broken("out of memory", fail)
    broken("killed", die)
    begin_again(2, *ports)
    broken("stopped", stop, SECONDS)
    if rank == 0:
        os.kill(processes[1], signal.SIGKILL)
    leave_alone(outcomes)


@pytest.fixture(scope="module", params=["auto", "halving"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    return run_ranks(3, misbehave_in_turn, folder, request.param, seconds=240, **DEEPSPEED)


def test_all_ends(finished):
    assert [f.returncode for f in finished] == [0, -signal.SIGKILL, -signal.SIGKILL], report(finished)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_loss_scaler_sees_an_overflow_of_one_rank(stage, finished):
    for each in finished:
        assert each.result is not None, report(finished)
        fine, overflown, *later = each.result["overflow"][stage]
        assert fine["bypasses"] == {} and fine["compressed"] and fine["skipped"] == 0
        assert overflown["bypasses"] == {"non-finite": 1} and overflown["skipped"] == 1
        assert overflown["scale"] == fine["scale"] / 2
        assert overflown["unchanged"] or stage == "3"  # where a rank sees nothing of its weights between steps
        for step in later:
            assert step["bypasses"] == {} and step["compressed"] and step["skipped"] == 1
            assert step["scale"] == overflown["scale"]


# case: (ranks, the errors of those that behave, that of the last, None if it is dead)
CASES = {
    "size": (3, {"MismatchError"}, {"MismatchError"}),
    "flipped": (3, {"FrameError", "PeerError"}, {"PeerError"}),
    "out of memory": (3, {"PeerError"}, {"OutOfMemoryError"}),
    "killed": (3, {"PeerError"}, None),
    "stopped": (2, {"PeerError"}, None),  # after the survivors of the case before began again
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_fails_on_every_rank(case, finished):
    size, others, last = CASES[case]
    for number in range(size):
        expected = others if number < size - 1 else last
        if expected is None:
            assert case not in finished[number].result
            continue
        assert case in finished[number].result, report(finished)
        first, second = finished[number].result[case]
        assert first["error"] in expected and first["seconds"] < SOON, first
        assert second["error"] == first["error"], second
    if case == "flipped":
        assert any("checksum" in finished[number].result[case][0]["message"] for number in range(size))
