"""Faults under DeepSpeed, one case after another in three processes; the last two cases cost one each."""

import os
import signal
import time

import deepspeed
import torch
import torch.distributed as dist
from common import attempt, leave, start
from small_engine import small_engine

import ncz_plugins.deepspeed  # noqa: F401
from ncz_plugins import kernels
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.transport.mesh_stream import MeshStream

SECONDS, LONG = 4.0, 120.0  # for what ends by time, and for what must end before
rank, world_size = start()
encode, send = kernels.cpu_backend().encode, MeshStream.send
outcomes = {}


def engine(seconds: float = LONG, stage: int = 2, **top_level):
    key = {"transport": {"min_bytes": 0, "timeout_seconds": seconds}, "entropy": {"checksum": True}}
    return small_engine(stage, key, **top_level)


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


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile
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
leave(outcomes)
os._exit(0)
