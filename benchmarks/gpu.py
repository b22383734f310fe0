"""Runs everything for a machine with a GPU: one command, about 8 minutes at most, no network.

    make gpu        or, where torch, CuPy, pytest and hypothesis are installed:  python benchmarks/gpu.py [--out FOLDER]
    TORCH_DIST_USE_NCCL2=0 make gpu        with the NCCL groups of torch before 2.15

Builds the native library if it is missing, because the tests compare results with it. Then runs, each for a limited
time: the compiler, so that no rank has to wait for it; the speed of the kernels; all_reduce over NCCL between processes
that share this GPU by CUDA MPS; training steps of DeepSpeed, if installed, likewise; and side by side the tests marked
`gpu` and compute-sanitizer (memcheck, racecheck), if installed, on the small ones. Shows the output of each, then a
table, and writes all figures to FOLDER/gpu.json and a picture of the speed-ups to FOLDER/gpu.png, if matplotlib is
installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that nothing needs to be installed

import torch
from rich.console import Console
from rich.table import Table

from ncz_plugins import kernels
from ncz_plugins.cli import machine
from ncz_plugins.kernels.cpu import LIBRARY

PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
# By CUDA MPS or without it, where processes are killed or watched. Ranks that tests start serve all tests of a file.
# Other folders need more packages, and no GPU.
RANKS = ["tests/distributed", "tests/integration"]
TESTS_BY_MPS = [
    ["tests/distributed/test_ddp.py"],
    ["tests/distributed/test_fsdp.py"],
    ["-n", "5", "--dist", "loadfile", "-k", "not test_ddp and not test_fsdp and not faults", *RANKS],
]
TESTS = [["-n", "4", "--dist", "load", "tests/cuda"], ["-k", "faults", "tests/distributed"]]
WITHOUT_MPS = ["env", "-u", "CUDA_MPS_PIPE_DIRECTORY", "-u", "CUDA_MPS_LOG_DIRECTORY"]
SMALL = ["-k", "test_floats_with_all_coders or test_frames", "tests/cuda/test_on_gpu.py"]
SMALLER = ["-k", "test_floats_with_all_coders", "tests/cuda/test_on_gpu.py"]  # racecheck is slower
COMPILE = [sys.executable, "-c", "from ncz_plugins.kernels.cuda import nvrtc; nvrtc.compile_ahead()"]


@dataclass
class Stage:
    name: str
    commands: list[list[str]]  # that run side by side
    seconds: int  # when to give up
    results: str | None = None  # JSON that it leaves
    shares_card: bool = False  # among processes whose times are to be compared


def stages(out: Path) -> list[Stage]:
    """What to do, what is wanted most first. All of it together takes less than 8 minutes."""
    kernels_json = out / "kernels.json"
    found = [
        Stage("compile", [COMPILE], 40),
        Stage("kernels", [[*_benchmark("gpu_kernels.py"), "--json", str(kernels_json)]], 20, kernels_json.name),
    ]
    for ranks, seconds in ((2, 35), (4, 45)):
        file = out / f"nccl-{ranks}-ranks.json"
        command = [*_benchmark("gpu_ranks.py"), "--ranks", str(ranks), "--json", str(file)]
        found.append(Stage(f"NCCL, {ranks} ranks", [command], seconds, file.name, shares_card=True))
    if importlib.util.find_spec("deepspeed"):
        file = out / "steps.json"
        command = [*_benchmark("gpu_steps.py"), "--kinds", "plain", "default", "bits", "--json", str(file)]
        found.append(Stage("training steps", [command], 80, file.name, shares_card=True))
    tests = [[*PYTEST, *each] for each in TESTS_BY_MPS] + [[*WITHOUT_MPS, *PYTEST, *each] for each in TESTS]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer:
        # Each tensor is memory of its own, so that what is read behind its end is seen.
        check = [*WITHOUT_MPS, "PYTORCH_NO_CUDA_MEMORY_CACHING=1", sanitizer, "--error-exitcode", "9", "--tool"]
        tests += [[*check, "memcheck", *PYTEST, *SMALL], [*check, "racecheck", *PYTEST, *SMALLER]]
    return [*found, Stage("tests", tests, 230, shares_card=True)]


def _benchmark(program: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / program)]


@contextlib.contextmanager
def shared_card() -> Iterator[dict[str, str]]:
    """CUDA MPS while this lasts: processes share the card at the same time, and not in slices of about 2 ms.

    Yields the environment variables that they need; none, with a word, where there is no MPS.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("nvidia-cuda-mps-control is not installed: the times of ranks tell of the driver's time slices")
        yield {}
        return
    # A folder of its own, as others may use the usual one. The daemon may still write to it at the end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = os.environ | variables
        try:
            subprocess.run([control, "-d"], env=environment, timeout=10, check=True)
        except subprocess.SubprocessError as error:
            print(f"MPS did not start, so the times of ranks tell of the driver's time slices: {error}")
            yield {}
            return
        try:
            yield variables
        finally:
            with contextlib.suppress(subprocess.SubprocessError):  # a server whose client was killed may hang
                subprocess.run([control], input="quit -t 5\n", text=True, env=environment, timeout=10)


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
    with (
        shared_card() if stage.shares_card else contextlib.nullcontext({}) as variables,
        tempfile.TemporaryFile("w+") as log,
    ):
        start = partial(subprocess.Popen, cwd=ROOT, env=environment | variables, start_new_session=True)
        first, *others = stage.commands  # the output of the others would be mixed with that of the first
        processes = [start(first), *(start(command, stdout=log, stderr=log) for command in others)]
        try:
            codes = [process.wait(max(0, started + stage.seconds - time.monotonic())) for process in processes]
            failed = [str(code) for code in codes if code]
            verdict = f"failed with {', '.join(failed)}" if failed else "passed"
        except subprocess.TimeoutExpired:
            verdict = f"not done within {stage.seconds} s"
        finally:
            for process in processes:  # with the ranks that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            print(log.read(), flush=True)
    return verdict, time.monotonic() - started


def draw(rows: list[dict], file: Path) -> None:
    """A picture of the speed-ups over plain NCCL against the size, if matplotlib is installed.

    Args:
        rows: what gpu_ranks.py found.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"{file.name} needs matplotlib: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((row["ranks"], row["dtype"]) for row in rows))
    figure, grid = pyplot.subplots(1, len(kinds), figsize=(4 * len(kinds), 4), squeeze=False, layout="constrained")
    for axes, kind in zip(grid[0], kinds):
        mine = [row for row in rows if (row["ranks"], row["dtype"]) == kind]
        for contender in dict.fromkeys(row["contender"] for row in mine):
            points = [(row["mib"], row["speed_up"]) for row in mine if row["contender"] == contender]
            axes.plot(*zip(*points), marker="o", label=contender)
        axes.set(xscale="log", xlabel="MiB", ylabel="speed-up over plain NCCL", title=f"{kind[0]} ranks, {kind[1]}")
        axes.legend()
    figure.savefig(file, dpi=120)


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
        "TORCH_DIST_USE_NCCL2": os.environ.get("TORCH_DIST_USE_NCCL2"),  # which class of groups "nccl" is
        "cupy": machine.report()["packages"]["cupy"],
        "python": platform.python_version(),
        "command": "python benchmarks/gpu.py",
        "stages": {},
    }
    table = Table(title=f"{report['gpu']}, torch {report['torch']}, NCCL {report['nccl']}, CuPy {report['cupy']}")
    for heading in ("stage", "outcome", "seconds"):
        table.add_column(heading)
    for stage in stages(arguments.out):
        print(f"\n=== {stage.name}: {'; '.join(map(shlex.join, stage.commands))}", flush=True)
        file = arguments.out / stage.results if stage.results else None
        if file:
            file.unlink(missing_ok=True)
        verdict, seconds = run(stage)
        figures = json.loads(file.read_text()) if file and file.exists() else None  # as far as it got
        report["stages"][stage.name] = {"outcome": verdict, "seconds": seconds, "figures": figures}
        (arguments.out / "gpu.json").write_text(json.dumps(report, indent=1))  # what there is, if the rest is cut off
        table.add_row(stage.name, verdict, f"{seconds:.0f}")
    Console().print(table)
    figures = [stage["figures"] for name, stage in report["stages"].items() if name.startswith("NCCL")]
    draw([row for rows in figures for row in rows or []], arguments.out / "gpu.png")
    if any(stage["outcome"] != "passed" for stage in report["stages"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
