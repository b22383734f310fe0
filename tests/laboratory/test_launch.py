"""Ranks that the laboratory starts behind links: they know who they are, meet over their links, and none is left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import gone, launched
from links import needs_links
from repository import LAUNCHED

from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import link

SECONDS = 120


@needs_links
def test_ranks_of_several_nodes_are_told_who_they_are(tmp_path):
    with link(2) as nodes:
        launched(
            run, "received", tmp_path, ranks=4, nodes=nodes, ranks_per_node=2, environment={"OMP_NUM_THREADS": "2"}
        )
    received = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for rank, found in enumerate(received):
        assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), "4")
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == (nodes[0].address, nodes[0].interface)
        assert found["host"] == nodes[rank // 2].address
        assert found["OMP_NUM_THREADS"] == "2"


@needs_links
def test_ranks_in_nodes_meet_over_their_links(tmp_path):
    with link(2, "1gbit") as nodes:
        assert launched(run, "gloo", tmp_path, nodes=nodes) == [{"sum": [3.0]}] * 2
        for node in nodes:
            assert 2 << 20 < node.bytes_sent() < 2.4 * 2**20  # each sends half a MiB twice per sum


@needs_links
def test_ranks_of_horovod_meet_over_their_links(tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not installed; `make setup` builds it")
    per_node, ranks = 2, 4
    with link(2, "1gbit") as nodes:
        (record,) = launched(run, "horovod", tmp_path, ranks, nodes=nodes, ranks_per_node=per_node, horovod=True)
        assert record["sum"] == [ranks * (ranks + 1) / 2]
        assert record["ranks"] == [[r, r % per_node, r // per_node, str(r)] for r in range(ranks)]
        for node in nodes:
            assert node.bytes_sent() > 1 << 20


def test_ranks_of_horovod_meet_on_one_host(tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not installed; `make setup` builds it")
    (record,) = launched(run, "horovod", tmp_path, horovod=True)
    assert record["sum"] == [3.0]
    assert record["ranks"] == [[0, 0, 0, "0"], [1, 1, 0, "1"]]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("where", ["here", pytest.param("links", marks=needs_links)])
def test_nothing_is_left_when_the_command_is_ended(where, sent, tmp_path):
    worker = [LAUNCHED, tmp_path / "records.jsonl", where]
    command = [sys.executable, Path(__file__).with_name("laboratory_command.py"), *worker]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams, text=True, start_new_session=True) as process:
        rank, child, *nodes = [int(pid) for pid in process.stdout.readline().split()]
        assert len(nodes) == (2 if where == "links" else 0)
        os.killpg(process.pid, sent)  # as a terminal does to all that it shows, or the system to what is in the way
        process.wait(SECONDS)
    gone([rank, *nodes])
    if sent == signal.SIGINT:  # which Python turns into an exception; the kernel itself ends ranks only
        gone([child])
