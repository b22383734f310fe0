"""The laboratory under horovodrun: the ranks it is given, Horovod among the contenders."""

import json
import sys

from launch import horovodrun, launch, needs_horovod


@needs_horovod
def test_horovodrun_gives_the_ranks(tmp_path):
    options = ["--sizes", "256K", "--data", "noise", "--peers", "horovod,fp16", "--repeat", "1", "--json"]
    command = horovodrun("-m", "benchmarks.laboratory.perf", "all_reduce", *options)
    assert sys.executable in command
    outcome = launch(command, tmp_path, timeout=280)
    first = "[0]<stdout>:"  # what horovodrun puts before each line
    lines = [line for line in outcome.output.splitlines() if "<stdout>:" in line]
    assert lines and all(line.startswith(first) for line in lines), outcome.output
    document = json.loads("\n".join(line.removeprefix(first) for line in lines))
    assert document["ranks"] == 2
    found = {record["peer"]: record for record in document["records"]}
    assert list(found) == ["plain", "ncz", "horovod", "fp16"]
    assert found["horovod"]["error"] < 1e-6 and 0 < found["ncz"]["of_bound"] <= 1
