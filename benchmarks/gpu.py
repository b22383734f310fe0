"""Runs everything for a machine with a GPU: one command, at most 8 minutes, no network.

    make gpu        or, where torch, CuPy, pytest and hypothesis are installed:  python benchmarks/gpu.py [--out FOLDER]

Builds the native library if it is missing, because the tests compare results with it. Then runs, each for a limited
time: the tests marked `gpu`; compute-sanitizer (memcheck, racecheck), if installed, on the small ones; the speed of the
kernels; and all_reduce over NCCL between processes on this GPU. Shows the output of each, then a table, and
writes all figures to FOLDER/gpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ncz_plugins import kernels
from ncz_plugins.cli import machine
from ncz_plugins.kernels.cpu import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
TESTS = ["tests/cuda", "tests/distributed", "tests/integration"]  # others need more packages, and no GPU
SMALL = ["-k", "test_floats_with_all_coders or test_frames", "tests/cuda/test_on_gpu.py"]


@dataclass
class Stage:
    name: str
    command: list[str]
    seconds: int  # when to give up
    results: str | None = None  # JSON that it leaves


def stages(out: Path) -> list[Stage]:
    found = [Stage("tests", [*PYTEST, *TESTS], 200)]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            found.append(Stage(tool, [sanitizer, "--tool", tool, "--error-exitcode", "9", *PYTEST, *SMALL], 50))
    for name, program in (("kernels", "gpu_kernels.py"), ("NCCL", "gpu_ranks.py")):
        file = out / f"{name.lower()}.json"
        command = [sys.executable, str(ROOT / "benchmarks" / program), "--json", str(file)]
        found.append(Stage(name, command, 70, file.name))
    return found


def build() -> None:
    """Make the native library, if it is missing: without it, the numpy kernels would take the time of the tests."""
    if kernels.statuses()["portable"] == "ok":
        return
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, timeout=120)
    if not LIBRARY.exists():
        sys.exit(
            f"{LIBRARY.name} is missing, and was not built: that takes a C++17 compiler and setuptools 70.1 or newer"
        )


def run(stage: Stage) -> tuple[str, float]:
    """How it ended, and after how many seconds."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(stage.command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(stage.seconds)
        verdict = "passed" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        verdict = f"not done within {stage.seconds} s"
    finally:  # with the ranks that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return verdict, time.monotonic() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here")
    build()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cupy": machine.report()["packages"]["cupy"],
        "python": platform.python_version(),
        "command": "python benchmarks/gpu.py",
        "stages": {},
    }
    table = Table(title=f"{report['gpu']}, torch {report['torch']}, NCCL {report['nccl']}, CuPy {report['cupy']}")
    for heading in ("stage", "outcome", "seconds"):
        table.add_column(heading)
    for stage in stages(arguments.out):
        print(f"\n=== {stage.name}: {' '.join(stage.command)}", flush=True)
        verdict, seconds = run(stage)
        file = arguments.out / stage.results if stage.results else None
        figures = json.loads(file.read_text()) if file and file.exists() and verdict == "passed" else None
        report["stages"][stage.name] = {"outcome": verdict, "seconds": seconds, "figures": figures}
        (arguments.out / "gpu.json").write_text(json.dumps(report, indent=1))  # what there is, if the rest is cut off
        table.add_row(stage.name, verdict, f"{seconds:.0f}")
    Console().print(table)
    if any(stage["outcome"] != "passed" for stage in report["stages"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
