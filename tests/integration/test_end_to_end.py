"""benchmarks.end_to_end, with a tiny model and the framework that has the fewest kinds: each trains and is told.

So it runs examples/train_diloco.py. Whether bytes are those that a kind's name promises is in test_ddp_traffic.py.
"""

import json
import sys
from importlib.util import find_spec

import pytest
from launch import launch
from links import needs_links

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_links, needs_torchft]

SIZES = "--frameworks diloco --layers 2 --width 64 --steps 4 --rounds 1 --link 100mbit".split()


def test_every_kind_is_trained_and_told(tmp_path):
    command = [sys.executable, "-m", "benchmarks.end_to_end", *SIZES, "--output", str(tmp_path / "results")]
    outcome = launch(command, tmp_path, timeout=500)
    found = json.loads((tmp_path / "results" / "end-to-end.json").read_text())
    assert (tmp_path / "results" / "end-to-end.png").read_bytes().startswith(b"\x89PNG")
    assert "DiLoCo" in outcome.output
    assert found["link"] == "100mbit" and "--layers 2" in found["command"]

    runs = {run["name"]: run for run in found["runs"]}
    assert list(runs) == ["plain", "ncclz"]
    plain, ours = runs["plain"], runs["ncclz"]
    assert ours["compression_ratio"] > 3 and plain["compression_ratio"] is None
    for run in runs.values():
        assert run["replicas_identical"]
        assert run["bytes_per_step"] >= run["gradient_bytes_per_step"] > 0
        assert len(run["seconds"]) == 1 and len(run["losses"]) == 4
        assert run["training_loss"] == pytest.approx(plain["training_loss"], rel=0.05)
        assert run["speed_up"] == pytest.approx(plain["step_seconds"] / run["step_seconds"])
    assert ours["bytes_per_step"] < 0.35 * plain["bytes_per_step"]
