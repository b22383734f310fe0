"""What tests of commands that start ranks have in common."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from repository import LAUNCHED

_SECONDS = 240  # until the ranks of a command are there, on a busy machine


def launched(run: Callable, case: str, tmp_path: Path, ranks: int = 2, **options) -> list:
    """Run a case of launched.py by `run`; returns what rank 0 told."""
    records = []
    command = [sys.executable, str(LAUNCHED), case, str(tmp_path)]
    options = {"timeout": 120, "on_record": records.append} | options
    run(command, ranks, tmp_path / "records.jsonl", **options)
    return records


def interrupt(command: list[str], module: str) -> tuple[int, str, str]:
    """Press Ctrl-C once a command has two ranks, and fail unless all that it started ends.

    Args:
        module: what a rank's command line names, once the helpers that start it have become it.

    Returns the exit status, standard output and standard error.
    """
    # Shells let what they start in the background ignore Ctrl-C.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **heeding) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + _SECONDS
        while sum(_names(pid, module) for pid in children.read_text().split()) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        others = children.read_text().split()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    gone([int(child) for child in others])
    return process.returncode, out, err


def _names(pid: str, module: str) -> bool:
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 30) -> None:
    """Wait until none of these processes is there any more, and fail if that does not come to pass."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)
