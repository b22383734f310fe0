"""The example that trains in a CUDA graph: replicas are identical, and on a GPU the graph learns as eager steps do."""

import shlex

import pytest
import torch
from launch import deepspeed_ranks, launch, torchrun
from repository import ROOT

from ncz_plugins.cli.perf.launch import free_port

SCRIPT = ROOT / "examples" / "train_cuda_graph.py"
pytestmark = pytest.mark.slow


def last_lines(folder, device: str, *options: str) -> list[str]:
    """What the example says of its last step and at its end."""
    given = ["--device", device, "--steps", "6", "--batch", "2", "--layers", "1", *options]
    if device == "cpu":
        command = deepspeed_ranks(SCRIPT, *given)  # forks of what other tests have imported
    else:  # as if each rank was on a host of its own, since they share a card
        meeting = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        single = torchrun(ranks=1)[:3]
        starts = [
            f"NCCL_HOSTID=host-{rank} {shlex.join([*single, '--node_rank', str(rank), *meeting, str(SCRIPT), *given])}"
            for rank in range(2)
        ]
        command = ["sh", "-c", f"{starts[0]} & {starts[1]} && wait $!"]
    lines = launch(command, folder, timeout=120).output.strip().splitlines()
    [end] = [at for at, line in enumerate(lines) if line.startswith(("without a graph", "in a CUDA graph"))]
    return lines[end - 1 : end + 1]


def test_the_step_without_a_graph(tmp_path):
    _, said = last_lines(tmp_path, "cpu")
    assert said.startswith("without a graph") and "replicas identical: True" in said
    assert float(said.split(", ")[1].split()[0]) > 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_graph_learns_as_eager_steps_do(tmp_path):
    """Not to the bit: the backward pass of attention adds in any order."""
    (in_graph, said), (eager, said_eager) = (
        last_lines(tmp_path / how, "cuda", *how.split()) for how in ("", "--eager")
    )
    assert said.startswith("in a CUDA graph") and said_eager.startswith("without a graph")
    assert "identical: True" in said and "identical: True" in said_eager
    assert float(in_graph.split()[-1]) == pytest.approx(float(eager.split()[-1]), rel=0.01)
