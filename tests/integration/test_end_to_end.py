"""benchmarks.end_to_end, with a tiny model: each kind trains, and its bytes are those that its name promises.

What DDP's hooks send is in test_ddp_traffic.py.
"""

import json
import sys

import pytest
from launch import launch, needs_horovod
from links import needs_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_horovod, needs_links]

SIZES = "--frameworks experts --layers 2 --width 64 --steps 5 --rounds 1 --link 100mbit".split()


def test_every_kind_is_trained_and_told(tmp_path):
    command = [sys.executable, "-m", "benchmarks.end_to_end", *SIZES, "--output", str(tmp_path / "results")]
    outcome = launch(command, tmp_path, timeout=500)
    found = json.loads((tmp_path / "results" / "end-to-end.json").read_text())
    assert (tmp_path / "results" / "end-to-end.png").read_bytes().startswith(b"\x89PNG")
    assert "experts" in outcome.output
    assert found["link"] == "100mbit" and "--layers 2" in found["command"]

    runs = {run["name"]: run for run in found["runs"]}
    assert list(runs) == ["plain", "bf16", "fp8", "ncclz"]
    plain, ours = runs["plain"], runs["ncclz"]
    assert ours["compression_ratio"] > 3 and plain["compression_ratio"] is None
    for run in runs.values():
        assert run["replicas_identical"]
        assert run["bytes_per_step"] > run["gradient_bytes_per_step"]
        assert len(run["seconds"]) == 2 and len(run["losses"]) == 5
        assert run["training_loss"] == pytest.approx(plain["training_loss"], rel=0.05)
        assert run["speed_up"] == pytest.approx(plain["step_seconds"] / run["step_seconds"])

    # Tokens on their way to experts and back are cast, or compressed, as gradients are.
    sent = {name: run["bytes_per_step"] / plain["bytes_per_step"] for name, run in runs.items()}
    assert sent["bf16"] < 0.6 and sent["fp8"] < 0.45 and sent["ncclz"] < 0.35, sent
