"""The tests of ZeRO's stages, with gradients on a GPU that two ranks share: `make gpu`, as machines of CI have none."""

import json
import os
import shlex

import pytest
import torch
from launch import WORKERS, launch, torchrun
from test_deepspeed_zero import (  # noqa: F401
    BOUND,
    CASES,
    case,
    test_another_engine_stays_plain,
    test_every_gradient_is_compressed,
    test_full_weights_are_exact,
    test_gradients_stay_within_the_bound,
    test_replicas_are_identical,
    test_the_loss_follows_the_plain_run,
)

from ncz_plugins.cli.perf.launch import free_port

DEVICE = os.environ.get("NCZ_TEST_DEVICE", "cuda")  # cpu, to try this file where there is no GPU
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device here"),
]
pytest.importorskip("deepspeed")

GPU_CASES = {
    **{name: CASES[name] for name in ("fp32 stage 0", "bf16 stage 1", "fp32 stage 2", "bf16 stage 3")},
    **{name: CASES[name] for name in ("fp32 stage 2 overlapping", "fp32 stage 3 overlapping")},
    **{name: CASES[name] for name in ("fp32 stage 2 at a fixed rate", "bf16 stage 3 at a fixed rate")},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    cases = folder / "cases.json"
    cases.write_text(json.dumps(GPU_CASES))
    # A launcher for each rank, as if on hosts of their own: each then takes its first GPU, and NCCL does not mind.
    port, commands = free_port(), []
    for rank in range(2):
        meeting = ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        program, *arguments = torchrun(WORKERS / "compare.py", cases, ranks=1)
        arguments = arguments[: arguments.index("--master_port")] + meeting + arguments[-2:]
        commands.append(f"NCCL_HOSTID=host-{rank} {shlex.join([program, *arguments])}")
    both = f"{commands[0]} & {commands[1]} && wait $!"
    return launch(["sh", "-c", both], folder, timeout=120, environment={"DS_ACCELERATOR": DEVICE}).ranks


@pytest.fixture(params=GPU_CASES)
def compared(request, two_ranks):
    """(the configuration, what every rank found)"""
    assert len(two_ranks) == 2
    return GPU_CASES[request.param], [rank[request.param] for rank in two_ranks]
