"""The demonstration ends with a message and without processes, whatever stops it. What it shows: test_make.py."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

SECONDS = 120  # they take seconds on an idle machine
STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# For a Python that stands in another place, from which it does not find them.
WITH_PACKAGES = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def demo(*arguments: object, python: str | Path = sys.executable, **options) -> Iterator[subprocess.Popen]:
    """The demonstration, which takes signals though the tests may ignore them, and ends with the block."""
    command = [python, ROOT / "examples" / "demo.py", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, preexec_fn=take_signals, **pipes, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def take_signals() -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


def with_words(words: str) -> list[str]:
    """Ids of the processes whose command line has these words."""

    def command_line(process: Path) -> str:
        try:
            return (process / "cmdline").read_text(errors="replace")
        except OSError:  # it has ended
            return ""

    return [each.name for each in Path("/proc").glob("[0-9]*") if words in command_line(each)]


def python_in(folder: Path) -> Path:
    """This Python under another name, beside which the demonstration looks for DeepSpeed's launcher."""
    (bare := folder / "bin" / "python").parent.mkdir()
    bare.symlink_to(shutil.which(sys.executable))
    return bare


def with_launcher(python: Path) -> Path:
    """`python`, beside which a launcher now starts two ranks, which wait."""
    # With a second command the shell stays, and with it the words of its command line.
    rank = "sh -c 'sleep 600; :' rank \"$@\" &\n"
    (launcher := python.with_name("deepspeed")).write_text(f"#!/bin/sh\n{rank}{rank}wait\n")
    launcher.chmod(0o755)
    return python


@pytest.mark.parametrize(("number", "trains"), [*zip(STOPPING, (True, False, False))])
def test_a_stopped_demonstration_leaves_no_process(number, trains, tmp_path):
    """While ranks train, by DeepSpeed's own launcher; and while they start, as if by it."""
    python, environment = (sys.executable, None) if trains else (with_launcher(python_in(tmp_path)), WITH_PACKAGES)
    records = tmp_path / "plain.jsonl"  # in the command line of the launcher and of each rank
    with demo("--steps", 40, "--output", tmp_path, python=python, env=environment) as process:
        deadline = time.monotonic() + SECONDS
        while len(with_words(str(records))) < 3 or trains and not (records.exists() and records.stat().st_size):
            assert time.monotonic() < deadline and process.poll() is None, "it did not come so far"
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, output
    assert f"stopped by {signal.Signals(number).name}, and so are the training processes" in output
    assert "Traceback" not in output
    deadline = time.monotonic() + SECONDS
    while left := with_words(str(records)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_second_one_beside_the_first_is_refused(tmp_path):
    with open(tmp_path / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with demo("--output", tmp_path) as process:
            output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"Another demonstration writes to {tmp_path}: wait for its end" in output
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_is_none_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with demo("--output", file) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"Can't write to {file}: File exists; give another folder as --output" in output


def test_a_missing_launcher_is_named_with_the_remedy(tmp_path):
    bare = python_in(tmp_path)
    with demo("--output", tmp_path / "results", python=bare, env=WITH_PACKAGES) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"DeepSpeed's launcher is not here: {bare.with_name('deepspeed')}. `make demo` installs it" in output


@pytest.mark.parametrize("option", ["--steps", "--ranks"])
def test_too_few_are_refused(option, tmp_path):
    with demo(option, 1, "--output", tmp_path) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert f"argument {option}: 1 is too few: give 2 or more" in output
