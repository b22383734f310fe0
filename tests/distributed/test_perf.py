"""`ncz perf`, run as a user runs it, on real ranks."""

import json
import subprocess
import sys

import pytest
from launching import interrupt
from repository import FORKED_RANKS

from ncz_plugins.core.config import Config

SECONDS = 240  # for one command, on a busy machine
KEYS = [
    "ranks",
    "peer",
    "size",
    "count",
    "type",
    "op",
    "rounds",
    "time_us",
    "times_us",
    "algbw",
    "busbw",
    "ratio",
    "wire_bytes",
    "network_bytes",
    "coders",
    "bypasses",
    "error",
    "max_error",
    "of_bound",
    "speedup",
]


# On a network of its own where there can be one: bytes of other tests would be counted, too.
ALONE = f"""
import os, sys
sys.path.insert(0, {str(FORKED_RANKS.parent)!r})
import forked_ranks
try:
    forked_ranks.enter_private_network()
except OSError:
    pass
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def ncz(*arguments, launcher=(), **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, "-m", "ncz_plugins", "perf", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, **options)


def read(done: subprocess.CompletedProcess) -> dict:
    """What --json printed, as strict JSON."""

    def no_number(name):
        raise AssertionError(f"{name} is not JSON")

    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_constant=no_number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("perf")


@pytest.fixture(scope="module")
def document(folder):
    options = ["--sizes", "1000,512K", "--data", "noise", "--peers", "fp16,ddp-bf16", "--repeat", "2", "--json"]
    where = "--plot", folder / "x.png", "--trace", folder / "x.json"
    done = ncz("all_reduce", *options, *where, launcher=["-c", ALONE])
    assert done.stderr == ""
    return read(done)


def test_json_says_what_was_done(document, folder):
    assert list(document) == [
        "command",
        "versions",
        "machine",
        "ranks",
        "notes",
        "job",
        "records",
    ]
    assert document["command"].startswith("ncz perf all_reduce --sizes 1000,512K --data noise --peers fp16,ddp-bf16")
    assert document["ranks"] == 2 and document["versions"]["torch"]
    assert Config.load(document["job"]["config"]) == Config()
    assert [(r["peer"], r["size"]) for r in document["records"]] == [
        (peer, size) for size in (1000, 1 << 19) for peer in ("plain", "ncz", "fp16", "ddp-bf16")
    ]


def test_records_agree_with_themselves(document):
    plain = {r["size"]: r for r in document["records"] if r["peer"] == "plain"}
    for r in document["records"]:
        assert list(r) == KEYS
        assert r["count"] == r["size"] // 4 and (r["type"], r["ranks"]) == ("float32", 2)
        assert r["op"] == ("avg" if r["peer"] == "ddp-bf16" else "sum")
        assert len(r["times_us"]) == r["rounds"] == 2
        assert r["time_us"] == pytest.approx(sum(r["times_us"]) / 2)
        assert r["algbw"] == pytest.approx(1e-3 * r["size"] / r["time_us"])
        assert r["busbw"] == pytest.approx(r["algbw"])  # 2 (n - 1) / n is 1 for 2 ranks
        assert r["speedup"] == pytest.approx(plain[r["size"]]["time_us"] / r["time_us"])
        assert r["network_bytes"] > 0


def test_ours_is_compressed_within_its_bound_and_small_tensors_are_not(document):
    small, large = (r for r in document["records"] if r["peer"] == "ncz")
    assert small["bypasses"] and small["ratio"] == 1 and not small["coders"] and small["of_bound"] is None
    assert not large["bypasses"] and large["ratio"] > 4 and sum(large["coders"].values()) > 0
    assert 0 < large["of_bound"] <= 1 and 0.01 < large["error"] < 0.5
    plain = next(r for r in document["records"] if r["peer"] == "plain" and r["size"] == large["size"])
    assert plain["error"] < 1e-6
    assert 0.95 * large["wire_bytes"] < large["network_bytes"] < plain["network_bytes"]


def test_the_picture_is_there(document, folder):
    assert (folder / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_trace_has_a_process_for_each_rank(document, folder):
    events = json.loads((folder / "x.json").read_text())["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"} == {
        (0, "rank 0"),
        (1, "rank 1"),
    }
    for own in (0, 1):
        spans = [e for e in events if e["pid"] == own and e["ph"] == "X"]
        assert {"encode", "decode"} <= {e["name"] for e in spans}
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)


def test_torchrun_gives_the_ranks_and_rank_0_prints(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = ncz("broadcast", "--sizes", "128K", "--data", "noise", "--repeat", "1", "--peers", "all", launcher=launcher)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1:5] for line in lines if line[:1] == ["ncz"]] == [["131072", "32768", "float32", "none"]]
    assert [line[1] for line in lines if line[:1] == ["plain"]] == ["131072"]
    assert "left out (has no broadcast): ddp-fp16" in done.stdout
    assert "All ranks are on this machine" in done.stdout


def test_a_failure_of_a_rank_is_one_message(tmp_path):
    (tmp_path / "c.yaml").write_text("transport: {hierarchy: 3}")  # does not divide 2 ranks
    done = ncz("all_reduce", "--sizes", "128K", "--data", "noise", "--config", tmp_path / "c.yaml")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ncz: error: rank ") and "hierarchy" in done.stderr


def test_ctrl_c_ends_it_and_leaves_nothing():
    command = [sys.executable, "-m", "ncz_plugins", "perf", "all_reduce", "--data", "noise"]
    assert interrupt([*command, "--sizes", "64M", "--repeat", "99"], "ncz_plugins.cli.perf.rank") == (130, "", "")


def test_other_commands_need_no_torch_for_it():
    code = "import sys, ncz_plugins.cli; assert not {'torch', 'matplotlib', 'horovod'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
