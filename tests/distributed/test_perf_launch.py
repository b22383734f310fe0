"""Ranks that the laboratory starts: they know who they are, what they tell arrives, and none outlives the call."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from links import gone, needs_links
from processes import WORKERS

from ncz_plugins.cli.perf import launch
from ncz_plugins.cli.perf.launch import run
from ncz_plugins.cli.perf.link import link
from ncz_plugins.core.errors import NczError, UnsupportedError

SECONDS = 120


def launched(case: str, tmp_path: Path, ranks: int = 2, **options) -> list:
    """Run a case of `_workers/launched.py`; returns what rank 0 told."""
    records = []
    command = [sys.executable, str(WORKERS / "launched.py"), case, str(tmp_path)]
    options = {"timeout": SECONDS, "on_record": records.append} | options
    run(command, ranks, tmp_path / "records.jsonl", **options)
    return records


def received(tmp_path: Path, ranks: int) -> list[dict]:
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_of_one_host_are_told_who_they_are(tmp_path):
    launched("received", tmp_path, ranks=3, standard_input='{"size": 1}')
    for rank, found in enumerate(received(tmp_path, 3)):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "3"
        assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        assert found["OMP_NUM_THREADS"] == "1" and found["input"] == '{"size": 1}'


@needs_links
def test_ranks_of_several_nodes_are_told_who_they_are(tmp_path):
    with link(2) as nodes:
        launched("received", tmp_path, ranks=4, nodes=nodes, ranks_per_node=2, environment={"OMP_NUM_THREADS": "2"})
    for rank, found in enumerate(received(tmp_path, 4)):
        assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), "4")
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == (nodes[0].address, nodes[0].interface)
        assert found["host"] == nodes[rank // 2].address
        assert found["OMP_NUM_THREADS"] == "2"


def test_what_starts_ranks_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="setpriv, which is not here: install util-linux"):
        launched("received", tmp_path)


def test_ranks_of_one_host_meet(tmp_path):
    assert launched("gloo", tmp_path) == [{"sum": [3.0]}] * 2


@needs_links
def test_ranks_in_nodes_meet_over_their_links(tmp_path):
    with link(2, "1gbit") as nodes:
        assert launched("gloo", tmp_path, nodes=nodes) == [{"sum": [3.0]}] * 2
        for node in nodes:
            assert 2 << 20 < node.bytes_sent() < 2.4 * 2**20  # each sends half a MiB twice per sum


@pytest.mark.parametrize("per_node", [1, 2])
@needs_links
def test_ranks_of_horovod_meet_over_their_links(per_node, tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not installed; `make setup` builds it")
    ranks = 2 * per_node
    with link(2, "1gbit") as nodes:
        (record,) = launched("horovod", tmp_path, ranks, nodes=nodes, ranks_per_node=per_node, horovod=True)
        assert record["sum"] == [ranks * (ranks + 1) / 2]
        assert record["ranks"] == [[r, r % per_node, r // per_node, str(r)] for r in range(ranks)]
        for node in nodes:
            assert node.bytes_sent() > 1 << 20


def test_ranks_of_horovod_meet_on_one_host(tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not installed; `make setup` builds it")
    (record,) = launched("horovod", tmp_path, horovod=True)
    assert record["sum"] == [3.0]
    assert record["ranks"] == [[0, 0, 0, "0"], [1, 1, 0, "1"]]


@pytest.mark.parametrize(
    ("case", "words"),
    [("dies", "rank 1 ended with exit status 1(.|\n)*the cat sat on the keyboard"), ("killed", "rank 1 .* SIGABRT")],
)
def test_a_rank_that_dies_is_told_with_its_last_words(case, words, tmp_path):
    with pytest.raises(NczError, match=words):
        launched(case, tmp_path)


def test_time_is_limited_and_nothing_is_left(tmp_path):
    records = []
    with pytest.raises(NczError, match="rank 0 has not ended after 5 s(.|\n)*waiting"):
        launched("waits", tmp_path, on_record=records.append, timeout=5)
    gone(records[0])


def test_nothing_is_left_when_the_receiver_of_records_fails(tmp_path):
    records = []

    def fail(record):
        records.append(record)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched("waits", tmp_path, on_record=fail)
    gone(records[0])


@needs_links
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(sent, tmp_path):
    command = [sys.executable, WORKERS / "laboratory.py", WORKERS / "launched.py", tmp_path / "records.jsonl"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams, text=True, start_new_session=True) as process:
        rank, child, *nodes = [int(pid) for pid in process.stdout.readline().split()]
        assert len(nodes) == 2
        os.killpg(process.pid, sent)  # as a terminal does to all that it shows, or the system to what is in the way
        process.wait(SECONDS)
    gone([rank, *nodes])
    if sent == signal.SIGINT:  # which Python turns into an exception; the kernel itself ends ranks only
        gone([child])
