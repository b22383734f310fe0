"""`ncz perf` and the laboratory under horovodrun: they take its ranks, and the laboratory measures Horovod itself."""

import json
import sys

import pytest
from launch import horovodrun, launch, needs_horovod


@needs_horovod
@pytest.mark.parametrize(
    "program, peer",
    [(["ncz_plugins", "perf"], "fp16"), (["benchmarks.laboratory.perf"], "horovod")],
    ids=["ncz", "laboratory"],
)
def test_horovodrun_gives_the_ranks(tmp_path, program, peer):
    options = ["--sizes", "256K", "--data", "noise", "--peers", peer, "--repeat", "1", "--json"]
    command = horovodrun("-m", *program, "all_reduce", *options)
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
