"""benchmarks.laboratory.perf, run as a researcher runs it: links are crossed, and what starts on them ends with it.

Without links: tests/integration/test_horovod_perf.py.
"""

import json
import subprocess
import sys

import pytest
from launching import interrupt
from links import needs_links

from benchmarks.laboratory.perf import main

SECONDS = 240  # for one command, on a busy machine
COMMAND = [sys.executable, "-m", "benchmarks.laboratory.perf"]


def perf(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS)


def read(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def on_two_links() -> dict:
    options = ["--link", "50mbit,unlimited", "--sizes", "256K", "--data", "noise", "--repeat", 1, "--json"]
    return read(perf("all_reduce", *options))


@needs_links
def test_a_link_is_crossed(on_two_links):
    for r in on_two_links["records"]:
        assert r["network_bytes"] >= 0.95 * (r["wire_bytes"] or r["size"])
    assert [r["link"] for r in on_two_links["records"]] == ["50mbit", "50mbit", "unlimited", "unlimited"]


@needs_links
def test_the_link_that_ranks_measure_decides_what_is_compressed(on_two_links):
    slow, fast = (r for r in on_two_links["records"] if r["peer"] == "ncz")
    assert not slow["bypasses"] and slow["ratio"] > 4
    assert list(fast["bypasses"]) == ["too small"] and fast["ratio"] == 1


@needs_links
def test_ranks_of_one_node_share_its_link():
    options = ["--sizes", "1M", "--data", "noise", "--repeat", 1, "--link", "1gbit"]
    done = perf("all_reduce", "--ranks", 4, "--ranks-per-node", 2, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("all_reduce, 4 ranks, data noise, 2 to a node:")
    assert "link 1gbit" in done.stdout and "All ranks are on this machine" not in done.stdout


@needs_links
def test_ctrl_c_ends_it_and_leaves_nothing():
    options = ["all_reduce", "--data", "noise", "--link", "10mbit", "--sizes", "64M", "--repeat", "99"]
    assert interrupt([*COMMAND, *options], "benchmarks.laboratory.rank") == (130, "", "")


@needs_links
def test_any_command_starts_behind_links(tmp_path):
    start = [sys.executable, "-m", "benchmarks.laboratory.start", "--link", "1gbit", "--ranks", "2"]
    tuned = tmp_path / "tuned.json"
    command = [*start, sys.executable, "-m", "ncz_plugins", "tune", "--seconds", "1", "--output", tuned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(tuned.read_text())["world_size"] == 2
    # A rank that fails ends the others.
    command = [*start, "sh", "-c", 'test "$RANK" = 1 && exit 3; sleep 600']
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--link", "1gb"], "'1gb' is not a rate such as 1gbit"),
        (["--peers", "zst"], "--peers: 'zst' is unknown; did you mean zstd?"),
        (["--ranks-per-node", "2"], "--ranks-per-node: needs --link RATE, which makes the nodes"),
        (["--link", "1gbit", "--ranks", "3", "--ranks-per-node", "2"], "--ranks-per-node: 2 does not divide --ranks 3"),
        (["--link", "1gbit,2gbit", "--trace", "x.json"], "--trace: records one call, and --link 1gbit,2gbit has 2"),
    ],
    ids=" ".join,
)
def test_mistakes_are_explained_before_anything_starts(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["all_reduce", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and says in output.err
