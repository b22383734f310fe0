"""What `make gpu` does can be tried, in part, where there is no GPU."""

import json
import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from repository import ROOT

from benchmarks import gpu

BENCHMARKS = ROOT / "benchmarks"


def test_all_of_it_takes_less_than_ten_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)  # as if everything was installed
    stages = gpu.stages(tmp_path, dry=False)
    assert sum(stage.seconds for stage in stages) <= gpu.SECONDS <= 560
    names = ["compile", "kernels", "calls, 2 ranks", "calls, 4 ranks", "tests", "sanitizer", "training steps"]
    assert [stage.name for stage in stages] == names
    checks = stages[names.index("sanitizer")].commands
    assert [command[command.index("--tool") + 1] for command in checks] == ["memcheck", "racecheck"]
    assert all(command[0] == "env" and "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in command for command in checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_it_needs_no_installation(tmp_path):
    """-S: no .pth files, by which this package is installed here."""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", str(BENCHMARKS / "gpu.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "finds no CUDA device here" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program in place of MPS's, which notes how it is called; gives what it noted."""
    program, notes = tmp_path / "nvidia-cuda-mps-control", tmp_path / "notes"
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $@ $([ $# = 0 ] && cat)" >> {notes}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return notes


def test_mps_has_a_folder_of_its_own_and_is_ended(control):
    with pytest.raises(KeyError), gpu.shared_card() as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir() and control.read_text().split() == [folder, "-d"]
        raise KeyError("of a stage")
    assert control.read_text().split() == [folder, "-d", folder, "quit", "-t", "5"]
    assert not Path(folder).exists()


def test_mps_that_does_not_start_is_said_and_done_without(control, monkeypatch, capsys):
    (control.parent / "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexit 1\n")
    with gpu.shared_card() as variables:
        assert variables == {}
    assert "MPS did not start" in capsys.readouterr().out


def test_without_mps_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    with gpu.shared_card() as variables:
        assert variables == {}
    assert "time slices" in capsys.readouterr().out


COUNTS = """
import time
print("1 passed", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("== 1 failed, 1 passed ==")
"""


def test_a_stage_that_takes_too_long_is_interrupted_and_says_what_it_found(tmp_path):
    slow = gpu.Stage("slow one", [["true"], [sys.executable, "-c", COUNTS]], 1)
    found = gpu.run(slow, 1.5, tmp_path)
    assert found["outcome"] == "not done within 2 s"
    assert found["last lines"] == {"slow-one-1.log": "", "slow-one-2.log": "1 failed, 1 passed"}
    assert gpu.run(gpu.Stage("wrong", [["true"], ["false"]], 20), 20, tmp_path)["outcome"] == "failed with 1"


def test_what_was_found_is_kept_when_a_stage_fails_and_when_all_of_it_is_ended(tmp_path):
    (tmp_path / "stages").mkdir()
    figures = tmp_path / "figures.json"
    stages = [
        gpu.Stage("first", [["sh", "-c", f"echo '[1]' > {figures}; exit 3"]], 5, figures),
        gpu.Stage("lacks a program", [], 5),
        gpu.Stage("ends it", [["sh", "-c", "kill -INT $PPID; sleep 60"]], 5),
        gpu.Stage("never", [["true"]], 5),
    ]
    with pytest.raises(KeyboardInterrupt):
        gpu.run_all(stages, tmp_path, {"stages": {}}, 60)
    kept = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert {name: stage["outcome"] for name, stage in kept.items()} == {
        "first": "failed with 3",
        "lacks a program": gpu.LACKS,
        "ends it": "ended from outside",
    }
    assert kept["first"]["figures"] == [1]


def test_a_stage_may_use_the_time_that_others_did_not_need(tmp_path):
    (tmp_path / "stages").mkdir()
    report = {"stages": {}}
    quick, longer = gpu.Stage("quick", [["true"]], 30), gpu.Stage("longer", [["sleep", "1"]], 0)
    gpu.run_all([quick, longer], tmp_path, report, 30)
    assert [stage["outcome"] for stage in report["stages"].values()] == ["passed", "passed"]
    gpu.run_all([longer, quick], tmp_path, report, 0.5)
    assert report["stages"]["longer"]["outcome"] == "left out: no time"


def test_the_program_of_the_kernels_launches_what_is_predicted():
    command = [sys.executable, str(BENCHMARKS / "gpu_kernels.py"), "--dry"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all calls were made" in done.stdout


@pytest.mark.slow
def test_the_program_of_the_host_times_calls_that_are_replayed_and_calls_that_are_not():
    pytest.importorskip("ncz_plugins.kernels.cuda.nvrtc", reason="needs CuPy", exc_type=ImportError)
    command = [sys.executable, str(BENCHMARKS / "gpu_host.py"), "--calls", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    anew, replayed = done.stdout.splitlines()
    assert anew.startswith("launched anew: median ") and anew.endswith(" us, 0 replayed")
    assert replayed.startswith("replayed: median ") and int(replayed.split()[-2]) >= 20


@pytest.mark.processes
def test_the_program_of_the_ranks_checks_and_draws(tmp_path):
    """On CPUs, over gloo."""
    file = tmp_path / "ranks.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_ranks.py"), "--device", "cpu", "--ranks", "2", "--mib", "1", "2"]
    command += ["--repeats", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    contenders = ("plain", "default", "always", "launched anew", "bits", "same bytes")  # a graph needs a GPU
    expected = [(t, m, c) for t in ("float32", "bfloat16") for m in (1, 2) for c in contenders]
    assert [(row["dtype"], row["mib"], row["contender"]) for row in rows] == expected
    for row in rows:
        assert row["ranks"] == 2 and 0 < row["host_seconds"] <= row["seconds"]
        if row["contender"] in ("default", "always", "bits"):
            assert row["within_bound"] and row["same_on_all_ranks"] and row["bypasses"] == {}
            assert row["ratio"] > (5 if row["dtype"] == "float32" else 2.5)
    gpu.save({"stages": {"calls, 2 ranks": {"figures": rows}}}, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.slow
def test_the_program_of_training_steps_trains_and_tells(tmp_path):
    """On CPUs, over gloo."""
    pytest.importorskip("deepspeed")
    file = tmp_path / "steps.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_steps.py"), "--device", "cpu", "--kinds", "default"]
    command += ["--layers", "1", "--width", "64", "--heads", "4", "--steps", "5", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    [ours] = json.loads(file.read_text())
    assert (ours["kind"], ours["speed_up"], ours["steps"]) == ("default", 1.0, 2)
    assert ours["ratio"] > 5 and ours["replicas_identical"]
