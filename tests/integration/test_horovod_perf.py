"""`ncz perf` and the laboratory under horovodrun: they take its ranks, and the laboratory measures Horovod itself."""

import json
import sys
from pathlib import Path

import pytest
from launch import horovodrun, launch, needs_horovod

from ncz_plugins.core.config import Config


@needs_horovod
@pytest.mark.parametrize(
    "program, peer",
    [(["ncz_plugins", "perf"], "fp16"), (["benchmarks.laboratory.perf"], "horovod")],
    ids=["ncz", "laboratory"],
)
def test_horovodrun_gives_the_ranks(tmp_path, program, peer):
    options = ["--sizes", "256K", "--data", "noise", "--peers", peer, "--repeat", "1", "--json"]
    # Pictures and recordings of `ncz perf` itself: tests/distributed/test_perf.py.
    files = ["--plot", tmp_path / "x.png", "--trace", tmp_path / "x.json"] if peer == "horovod" else []
    command = horovodrun("-m", *program, "all_reduce", *options, *files)
    assert sys.executable in command
    outcome = launch(command, tmp_path, timeout=280)
    first = "[0]<stdout>:"  # what horovodrun puts before each line
    lines = [line for line in outcome.output.splitlines() if "<stdout>:" in line]
    assert lines and all(line.startswith(first) for line in lines), outcome.output
    document = json.loads("\n".join(line.removeprefix(first) for line in lines))
    assert document["ranks"] == 2
    found = {record["peer"]: record for record in document["records"]}
    assert list(found) == ["plain", "ncz", peer]
    assert found[peer]["error"] < (1e-6 if peer == "horovod" else 1e-3) and 0 < found["ncz"]["of_bound"] <= 1
    if files:
        is_all_that_was_measured(document, tmp_path / "x.png", tmp_path / "x.json")


def is_all_that_was_measured(document: dict, picture: Path, recording: Path) -> None:
    """What the laboratory adds to the document of `ncz perf`, and the files that it writes."""
    assert document["ranks_per_node"] == 1
    assert document["command"].startswith("python -m benchmarks.laboratory.perf all_red")
    [job] = document["jobs"]
    assert Config.load(job["config"]) == Config() and job["link"] is None
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads(recording.read_text())["traceEvents"]
