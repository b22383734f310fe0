"""benchmarks.end_to_end, with a tiny model: each kind trains, and its bytes are those that its name promises."""

import json
import sys

import pytest
from launch import launch, needs_horovod
from links import needs_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_horovod, needs_links]

SIZES = "--frameworks ddp,experts --layers 2 --width 64 --steps 5 --rounds 1 --link 100mbit".split()


def test_every_kind_is_trained_and_told(tmp_path):
    command = [sys.executable, "-m", "benchmarks.end_to_end", *SIZES, "--output", str(tmp_path / "results")]
    outcome = launch(command, tmp_path, timeout=500)
    found = json.loads((tmp_path / "results" / "end-to-end.json").read_text())
    assert (tmp_path / "results" / "end-to-end.png").read_bytes().startswith(b"\x89PNG")
    assert "DDP" in outcome.output
    assert found["link"] == "100mbit" and "--layers 2" in found["command"]

    of_ddp, of_experts = (
        {run["name"]: run for run in found["runs"] if run["framework"] == framework} for framework in ("DDP", "experts")
    )
    assert len(of_ddp) + len(of_experts) == len(found["runs"])
    runs = of_ddp
    assert runs.pop("powersgd")["replicas_identical"]
    plain, half, ours = (runs.pop(name) for name in ("plain", "bf16", "ncclz"))
    assert not runs
    parameters = 2 * (12 * 64**2 + 13 * 64) + (256 + 128 + 2) * 64
    assert 4 * parameters < plain["gradient_bytes_per_step"] < 4.4 * parameters
    assert half["gradient_bytes_per_step"] < 0.6 * plain["gradient_bytes_per_step"]
    assert ours["gradient_bytes_per_step"] < 0.3 * plain["gradient_bytes_per_step"]
    assert ours["compression_ratio"] > 4 and plain["compression_ratio"] is None
    for run in (plain, half, ours):
        assert run["replicas_identical"]
        assert run["bytes_per_step"] > run["gradient_bytes_per_step"]
        assert len(run["seconds"]) == 2 and len(run["losses"]) == 5
        assert run["training_loss"] == pytest.approx(plain["training_loss"], rel=0.05)
        assert run["speed_up"] == pytest.approx(plain["step_seconds"] / run["step_seconds"])

    # Tokens on their way to experts and back are cast, or compressed, as gradients are.
    sent = {name: run["bytes_per_step"] / of_experts["plain"]["bytes_per_step"] for name, run in of_experts.items()}
    assert sent["bf16"] < 0.6 and sent["fp8"] < 0.45 and sent["ncclz"] < 0.35, sent
    assert all(run["replicas_identical"] for run in of_experts.values())
    assert of_experts["ncclz"]["compression_ratio"] > 3
