"""The tests of ZeRO's stages, with gradients on a GPU that two ranks share: `make gpu`, as machines of CI have none."""

import os
import shlex

import pytest

pytest.importorskip("deepspeed")

import torch
from launch import launch, torchrun
from on_rank import rank
from scenarios import program
from test_deepspeed_zero import CASES, trains_as_without_compression

from ncz_plugins.cli.perf.launch import free_port

DEVICE = os.environ.get("NCZ_TEST_DEVICE", "cuda")  # cpu, to try this file where there is no GPU
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device here"),
]
GPU_CASES = (
    *("fp32 stage 0", "bf16 stage 1", "fp32 stage 2", "bf16 stage 3"),
    *("fp32 stage 2 overlapping", "fp32 stage 3 overlapping"),
    *("fp32 stage 2 at a fixed rate", "bf16 stage 3 at a fixed rate"),
)


def train_each_case() -> list[str]:
    done = []
    for name in GPU_CASES:
        print(f"rank {rank}: {name}", flush=True)
        trains_as_without_compression(CASES[name])
        done.append(name)
    return done


def test_two_ranks_train_as_without_compression(tmp_path):
    # A launcher for each rank, as if on hosts of their own: each then takes its first GPU, and NCCL does not mind.
    scenario = program(train_each_case, tmp_path, device=DEVICE)
    meeting = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    single = torchrun(ranks=1)[:3]
    commands = [
        f"NCCL_HOSTID=host-{rank} {shlex.join([*single, '--node_rank', str(rank), *meeting, *scenario])}"
        for rank in range(2)
    ]
    both = f"{commands[0]} & {commands[1]} && wait $!"
    outcome = launch(["sh", "-c", both], tmp_path, timeout=120, environment={"DS_ACCELERATOR": DEVICE})
    assert outcome.ranks == [list(GPU_CASES)] * 2
