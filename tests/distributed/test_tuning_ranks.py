"""Measured by real ranks: they choose alike, whatever the times are; files that all must have; `ncz tune`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import results, run

from ncz_plugins.core.config import FRAME_BYTES, Config
from ncz_plugins.core.tuning.tuning_file import Tuning

NCZ = [sys.executable, "-m", "ncz_plugins"]


@pytest.fixture(scope="module", params=[(3, "off"), (4, "2")], ids=["3 ranks", "2 nodes of 2"])
def outcomes(request, tmp_path_factory):
    ranks, hierarchy = request.param
    arguments = [] if hierarchy == "off" else [hierarchy]
    return results(run("tuning", ranks, tmp_path_factory.mktemp("tuning"), *arguments, seconds=200))


def alike(outcomes, name):
    """What all ranks found."""
    assert all(outcome[name] == outcomes[0][name] for outcome in outcomes), name
    return outcomes[0][name]


def test_all_ranks_choose_alike_at_the_opening(outcomes):
    config = Config.load(json.loads(alike(outcomes, "opened")))
    assert config.transport.schedule in ("ring", "direct")
    assert config.transport.frame_bytes in (4 << 20, 1 << 20)
    assert config.transport.min_bytes == "never" or config.transport.min_bytes >= 16 << 10
    assert config.transport.link_gbps > 0 and config.entropy.costs is not None


def test_one_rank_says_it_in_one_line(outcomes):
    printed = [outcome["printed"] for outcome in outcomes]
    assert printed[1:] == [""] * (len(outcomes) - 1)
    assert re.fullmatch(rf"ncz_plugins: measured {len(outcomes)} ranks, [0-9.e+]+ Gbit/s, .*\n", printed[0])


def test_what_was_measured_with_is_not_counted(outcomes):
    assert alike(outcomes, "calls") == 0 and alike(outcomes, "counted") == 1


def test_results_are_bit_identical_after_tuning(outcomes):
    alike(outcomes, "sum")


def test_what_is_named_is_kept(outcomes):
    assert alike(outcomes, "named") == ["ring", 64 << 10, 3]


def test_a_file_is_followed(outcomes):
    assert alike(outcomes, "from file") == ["direct", 128 << 10, 1 << 20, 0.5]
    assert alike(outcomes, "costs") == {"raw": 1, "fixed": 2, "huffman": 3, "rans": 4, "rans_rest": 5}
    assert alike(outcomes, "below") == {"too small": 1}


def test_a_link_that_is_too_fast_is_a_reason_of_its_own(outcomes):
    assert alike(outcomes, "never") == {"link too fast": 1}


def test_a_file_of_other_ranks_gives_a_warning_and_no_schedule(outcomes):
    assert alike(outcomes, "others") == ["auto", 128 << 10]
    for outcome in outcomes:
        (warning,) = outcome["warned"]
        assert f"was measured with {len(outcomes) + 1} ranks, not {len(outcomes)}" in warning


def test_files_that_differ_are_an_error_on_every_rank(outcomes):
    for outcome in outcomes:
        kind, text = outcome["differing"]
        assert kind == "MismatchError" and "transport.min_bytes is 1048576 on rank 0, 2097152 on rank 1" in text


def test_a_missing_or_damaged_file_is_an_error_on_every_rank(outcomes):
    for rank, outcome in enumerate(outcomes):
        kind, text = outcome["missing everywhere"]
        assert kind == "ConfigError" and "nowhere.json: cannot be read" in text and "ncz tune --output" in text
        kind, text = outcome["missing on rank 1"]
        assert kind == ("ConfigError" if rank == 1 else "MismatchError") and "nowhere.json: cannot be read" in text
        kind, text = outcome["damaged"]
        assert kind == "ConfigError" and "invalid JSON" in text


# ------------------------------------------------------------------ the command


def ncz(*arguments: str, command: list[str] = NCZ, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*command, "tune", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_command_starts_ranks_and_writes_a_file(tmp_path):
    file = tmp_path / "tuned.json"
    done = ncz("--ranks", "3", "--seconds", "1", "--output", str(file))
    assert done.returncode == 0, done.stderr
    tuned = Tuning.read(file)
    assert tuned.world_size == 3
    assert {trial.schedule for trial in tuned.trials} == {"ring", "direct"}
    sizes = [each.nbytes for each in tuned.comparisons]
    assert sizes == sorted(set(sizes)) and sizes[0] == 16 << 10
    assert tuned.describe() in done.stdout and "chosen" in done.stdout
    assert "All ranks are on this machine" in done.stdout
    assert f"transport: {{tuning: {file}, frame_bytes: auto, min_bytes: auto}}" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]


def test_the_command_takes_the_ranks_of_a_launcher_and_a_configuration(tmp_path):
    file, config = tmp_path / "tuned.json", tmp_path / "c.yaml"
    config.write_text("quantizer:\n  value: 0.5\ntransport:\n  frame_bytes: 64KiB\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = ncz("--seconds", "1", "--output", str(file), "--config", str(config), command=[*torchrun, "ncz_plugins"])
    assert done.returncode == 0, done.stderr
    tuned = Tuning.read(file)
    assert tuned.world_size == 2 and tuned.quantizer.startswith("stochastic rms:0.5 ")
    assert tuned.trials[0].frame_bytes == FRAME_BYTES  # chosen all the same
    assert done.stdout.count("is written") == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "1"], "a single rank sends nothing, so there is nothing to tune"),
        (["--ranks", "none"], "--ranks: 'none' is not a number above 0"),
        (["--seconds", "0"], "--seconds: 0 is not a number above 0"),
        (["--seconds", "nan"], "--seconds: nan is not a number above 0"),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_what_can_not_be_done_is_said(tmp_path, arguments, says):
    file = tmp_path / "tuned.json"
    done = ncz(*arguments, "--output", str(file))
    assert done.returncode == 2 and says in done.stderr and not file.exists()


def test_a_file_that_can_not_be_written_is_said_before_anything_is_measured(tmp_path):
    done = ncz("--output", str(tmp_path / "none" / "tuned.json"))
    assert done.returncode == 2 and "none/tuned.json: no file can be made there" in done.stderr


def test_ctrl_c_ends_all_ranks_and_leaves_no_file(tmp_path):
    file = tmp_path / "tuned.json"
    process = subprocess.Popen([*NCZ, "tune", "--output", str(file)], start_new_session=True)
    try:
        ranks = wait_for(lambda: len(found := children(process.pid)) == 2 and found, seconds=120)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=20)
    finally:
        process.kill()
        process.wait()
    assert not file.exists()


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []


def wait_for(condition, seconds: float):
    """What `condition` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.05)
    return value
