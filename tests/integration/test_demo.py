"""The demonstration ends with a message and without processes, whatever stops it. What it shows: test_make.py."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

SECONDS = 120  # they take seconds on an idle machine


def demo(*arguments: object, python: str | Path = sys.executable, **options) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([python, ROOT / "examples" / "demo.py", *map(str, arguments)], **pipes, **options)


def with_words(words: str) -> list[str]:
    """Ids of the processes whose command line has these words."""

    def command_line(process: Path) -> str:
        try:
            return (process / "cmdline").read_text(errors="replace")
        except OSError:  # it has ended
            return ""

    return [each.name for each in Path("/proc").glob("[0-9]*") if words in command_line(each)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_demonstration_leaves_no_process(number, tmp_path):
    log_file = str(tmp_path / "plain.jsonl")  # in the command line of the launcher and of each rank
    process = demo("--steps", 4, "--output", tmp_path)
    deadline = time.monotonic() + SECONDS
    while not with_words(log_file):
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    while left := with_words(log_file):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_second_one_beside_the_first_is_refused(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = demo("--output", tmp_path)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        os.close(held)
    assert process.returncode == 1
    assert f"Another demonstration writes to {tmp_path}: wait for its end" in output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_launcher_is_named_with_the_remedy(tmp_path):
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.symlink_to(shutil.which(sys.executable))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = demo("--output", tmp_path / "results", python=bare, env=environment)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"DeepSpeed's launcher is not here: {bare.with_name('deepspeed')}. `make demo` installs it" in output


@pytest.mark.parametrize("option", ["--steps", "--ranks"])
def test_too_few_are_refused(option, tmp_path):
    process = demo(option, 1, "--output", tmp_path)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert f"argument {option}: 1 is too few: give 2 or more" in output
