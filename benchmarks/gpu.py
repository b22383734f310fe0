"""Runs everything for a machine with a GPU: one command, 9 minutes at most, no network.

    make gpu                            makes .venv first, which takes a network
    python3 benchmarks/gpu.py           on a machine that has torch and no network, with the folder of `make carry`
    python3 benchmarks/gpu.py --dry     without a GPU: each stage, but for what takes one
    TORCH_DIST_USE_NCCL2=0 make gpu     with the NCCL groups of torch before 2.15

The stages, what is wanted most first, each for a limited time:

    compile           the kernels, unless they were carried, so that no rank waits for them
    kernels           microseconds of each kernel beside its prediction, and the speed of whole operations
    calls             all_reduce over NCCL between 2 and 4 processes that share this GPU by CUDA MPS
    tests             those marked `gpu`
    sanitizer         compute-sanitizer's memcheck and racecheck, on small tests
    training steps    of DeepSpeed, between 2 processes that share this GPU

What was found is kept if a later stage fails or is cut off, or if this program is ended: figures and output in
FOLDER/stages as they come, and all figures in FOLDER/gpu.json after each stage. A summary follows, and a picture of the
speed-ups, FOLDER/gpu.png, if matplotlib is installed.
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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # so that nothing needs to be installed

import carry

if __name__ == "__main__":
    carry.unpack()

import torch
from rich.console import Console
from rich.table import Table

from ncz_plugins import kernels
from ncz_plugins.cli import machine
from ncz_plugins.kernels.cpu import LIBRARY

SECONDS = 540  # for all stages
LACKS = "left out: see what is not here"
SECONDS_TO_END = 8  # for a command that is interrupted: pytest then says what has failed so far
PYTHON = [sys.executable, "-u"]
PYTEST = [*PYTHON, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
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
# Without a GPU: the same programs on CPUs, with little to do.
SMALL_CALLS = ["--device", "cpu", "--mib", "1", "--repeats", "1"]
SMALL_STEPS = ["--device", "cpu", "--layers", "1", "--width", "64", "--heads", "4", "--steps", "4"]


@dataclass
class Stage:
    """A part of the run.

    Attributes:
        commands: run side by side.
        seconds: when to give up; later, if the stages before it took less than theirs.
        figures: JSON file that it leaves.
        shares_card: whether processes of it, whose times are compared, share the GPU.
    """

    name: str
    commands: list[list[str]]
    seconds: int
    figures: Path | None = None
    shares_card: bool = False


def stages(folder: Path, dry: bool) -> list[Stage]:
    """What to do, what is wanted most first. A stage that lacks a program or package has no commands.

    Args:
        folder: where they leave their figures.
        dry: without a GPU.
    """
    file = folder / "kernels.json"
    compile = f"import carry; carry.prepare_kernels({carry.ARCH!r})" if dry else "import carry; carry.prepare_kernels()"
    found = [
        Stage("compile", [[*PYTHON, "-c", compile]], 40),
        Stage("kernels", [[*_benchmark("gpu_kernels.py", file), *["--dry"] * dry]], 40, file),
    ]
    for ranks, seconds in ((2, 40), (4, 50)):
        file = folder / f"calls-{ranks}-ranks.json"
        command = [*_benchmark("gpu_ranks.py", file), "--ranks", str(ranks), *(SMALL_CALLS if dry else [])]
        found.append(Stage(f"calls, {ranks} ranks", [command], seconds, file, shares_card=True))
    tests = [[*PYTEST, *each] for each in TESTS_BY_MPS] + [[*WITHOUT_MPS, *PYTEST, *each] for each in TESTS]
    if dry:  # without a GPU there are no tests marked `gpu`: all are looked at, in the same files
        tests = [[*PYTHON, "-m", "pytest", "--collect-only", "-q", *each] for each in TESTS_BY_MPS + TESTS]
    found.append(Stage("tests", tests, 190, shares_card=True))
    found.append(Stage("sanitizer", _sanitizing(dry), 90))
    file = folder / "training-steps.json"
    command = [*_benchmark("gpu_steps.py", file), "--kinds", "plain", "default", "bits", *(SMALL_STEPS if dry else [])]
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    found.append(Stage("training steps", [command] * has_deepspeed, 70, file, shares_card=True))
    return found


def _benchmark(program: str, figures: Path) -> list[str]:
    return [*PYTHON, str(ROOT / "benchmarks" / program), "--json", str(figures)]


def _sanitizing(dry: bool) -> list[list[str]]:
    """Commands of compute-sanitizer; none, if it is not installed."""
    program = _compute_sanitizer()
    if program is None:
        return []
    if dry:
        return [[program, "--version"]]
    # Each tensor is memory of its own, so that what is read behind its end is seen.
    check = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", program, "--error-exitcode", "9", "--tool"]
    return [[*check, "memcheck", *PYTEST, *SMALL], [*check, "racecheck", *PYTEST, *SMALLER]]


def _compute_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def lacking() -> list[str]:
    """What is not here, and what that means."""
    packages = {
        "cupy": "no kernel runs",
        "pytest": "no test runs",
        "pytest_timeout": "no test runs",
        "xdist": "most tests don't run",
        "hypothesis": "tests of kernels don't run",
        "deepspeed": "no training steps",
        "matplotlib": "no picture",
        "nvidia.nvcomp": "no comparison with nvCOMP",
    }
    found = (
        [] if torch.cuda.is_available() else [f"a CUDA device that torch {torch.__version__} sees: nothing is measured"]
    )
    for package, meaning in packages.items():
        if importlib.util.find_spec(package.partition(".")[0]) is None or importlib.util.find_spec(package) is None:
            found.append(f"{package}: {meaning}")
    if shutil.which("nvidia-cuda-mps-control") is None:
        found.append("nvidia-cuda-mps-control: the times of ranks tell of the driver's time slices")
    if _compute_sanitizer() is None:
        found.append("compute-sanitizer: memory accesses and races are not checked")
    return found


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


def run(stage: Stage, seconds: float, folder: Path) -> dict:
    """Run the commands of a stage.

    Args:
        seconds: when to give up.
        folder: where each command's output goes, as it comes.

    Returns: the outcome, and the last line of each command's output.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    names = [
        f"{stage.name.replace(', ', '-').replace(' ', '-')}-{number + 1}.log" for number in range(len(stage.commands))
    ]
    with ExitStack() as stack:
        variables = stack.enter_context(shared_card()) if stage.shares_card and torch.cuda.is_available() else {}
        environment = os.environ | {"PYTHONPATH": paths} | variables
        processes = []
        try:
            for command, name in zip(stage.commands, names):
                log = stack.enter_context(open(folder / name, "wb"))
                # A session of its own, to be ended with all that it starts.
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
                processes.append(process)
            outcome = _outcome(processes, seconds)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    last_lines = [(folder / name).read_text(errors="replace").rstrip().rpartition("\n")[2] for name in names]
    return {"outcome": outcome, "last lines": dict(zip(names, (line.strip("= ") for line in last_lines)))}


def _outcome(processes: list[subprocess.Popen], seconds: float) -> str:
    """Wait for the commands of a stage, and interrupt them if they take too long."""
    end = time.monotonic() + seconds
    try:
        failed = [code for process in processes if (code := process.wait(max(0, end - time.monotonic())))]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            end = time.monotonic() + SECONDS_TO_END
            for process in processes:
                process.wait(max(0, end - time.monotonic()))
        return f"not done within {seconds:.0f} s"
    return f"failed with {', '.join(map(str, failed))}" if failed else "passed"


def run_all(found: list[Stage], out: Path, report: dict, seconds: float) -> None:
    """Run the stages, and keep after each what there is.

    Args:
        report: all that is known; what the stages find is added, and written to out/gpu.json.
    """
    end = time.monotonic() + seconds
    for number, stage in enumerate(found):
        started = time.monotonic()
        left, later = end - started, sum(each.seconds for each in found[number + 1 :])
        here = report["stages"][stage.name] = {"outcome": "ended from outside"}
        print(f"=== {stage.name}: {'; '.join(map(shlex.join, stage.commands))}", flush=True)
        try:
            if not stage.commands:
                here["outcome"] = LACKS
            elif left < 1:
                here["outcome"] = "left out: no time"
            else:
                # What the stages before have not used is for this one.
                here |= run(stage, max(min(stage.seconds, left), left - later), out / "stages")
        finally:
            here["seconds"] = time.monotonic() - started
            if stage.figures and stage.figures.exists():
                here["figures"] = json.loads(stage.figures.read_text())  # as far as it got
            (out / "gpu.json").write_text(json.dumps(report, indent=1))
            print(f"{here['outcome']}, {here['seconds']:.0f} s", flush=True)


# ------------------------------------------------------------------ at the end


def calls_of(report: dict) -> list[dict]:
    """The rows of all calls, see gpu_ranks.py."""
    stages = [stage for name, stage in report["stages"].items() if name.startswith(("calls", "NCCL"))]  # NCCL: before
    return [row for stage in stages for row in stage.get("figures", [])]


def calls_table(rows: list[dict]) -> Table:
    """Milliseconds of plain calls, and the speed-up of the others."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    table = Table(title="all_reduce: ms of plain NCCL, and how many times as fast the others are")
    for heading in ("ranks", "dtype", "MiB", *contenders):
        table.add_column(heading, justify="right")
    by_call: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        by_call.setdefault((row["ranks"], row["dtype"], row["mib"]), {})[row["contender"]] = row
    for call, found in by_call.items():
        plain = f"{1e3 * found['plain']['seconds']:.2f}"
        others = [f"{found[name]['speed_up']:.2f}" if name in found else "" for name in contenders if name != "plain"]
        table.add_row(*map(str, call), plain, *others)
    return table


def summary(report: dict) -> Table:
    """One row for each stage, and what its commands said last, as pytest its counts."""
    title = f"{report['gpu']}, torch {report['torch']}, NCCL {report['nccl']}, CuPy {report['cupy']}"
    table = Table(title=title)
    for heading in ("stage", "outcome", "seconds", "last lines"):
        table.add_column(heading)
    for name, stage in report["stages"].items():
        lines = "\n".join(stage.get("last lines", {}).values()) if name in ("tests", "sanitizer") else ""
        table.add_row(name, stage["outcome"], f"{stage['seconds']:.0f}", lines)
    return table


def save(report: dict, file: Path) -> None:
    """Draw the picture, if matplotlib is installed."""
    try:
        from ncz_plugins.cli.picture import save_figure
    except ImportError:
        print(f"{file.name} needs matplotlib: pip install matplotlib")
    else:
        save_figure("--out", file, lambda: draw(report))


def draw(report: dict):
    """A figure of the speed-ups over plain NCCL against the size."""
    from ncz_plugins.cli.picture import COLORS, OTHERS, finish, ink, logarithmic, new_figure

    # Other ways of ours have the same colour as what they are a way of.
    ours, bits = COLORS["default"], COLORS["bits"]
    styles = {"always": (ours, "--"), "bits in a graph": (bits, "--"), "same bytes": (ink(), ":")}
    rows = calls_of(report)
    kinds = list(dict.fromkeys((row["ranks"], row["dtype"]) for row in rows))
    figure, panels = new_figure(len(kinds), height=2.35, share_x=True)
    for axes, kind in zip(panels, kinds):
        mine = [row for row in rows if (row["ranks"], row["dtype"]) == kind]
        for contender in dict.fromkeys(row["contender"] for row in mine):
            points = [(row["mib"], row["speed_up"]) for row in mine if row["contender"] == contender]
            color, line = styles.get(contender) or (COLORS.get(contender, OTHERS[1]), "-")
            label = contender if axes is panels[0] else None
            axes.plot(*zip(*points), line, color=color, marker="o", markersize=5, label=label)
        axes.set_ylim(bottom=0)
        finish(axes, f"speed-up over plain NCCL, {kind[0]} ranks, {kind[1]}")
    logarithmic(panels[-1].xaxis)
    panels[-1].set_xlabel("MiB")
    sizes = sorted({row["mib"] for row in rows})
    panels[-1].set_xticks(sizes, [f"{mib:g}" for mib in sizes])
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="FOLDER", help="default: results")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages (default: %(default)s)")
    arguments = parser.parse_args()
    lacks = lacking()
    print("\n".join(f"not here: {each}" for each in lacks), flush=True)
    if not (torch.cuda.is_available() or arguments.dry):
        sys.exit(f"torch {torch.__version__} finds no CUDA device here. --dry tries all that needs none")
    # Ends like an interruption: what was found is written, and nothing goes on running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("COLUMNS", "120")  # of tables that go to files
    build()
    folder = arguments.out.resolve() / "stages"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = about() | {"lacks": lacks, "stages": {}}
    try:
        run_all(stages(folder, arguments.dry), folder.parent, report, arguments.seconds)
    finally:
        if (folder / "kernels-1.log").exists():
            print((folder / "kernels-1.log").read_text())
        rows = [] if arguments.dry else calls_of(report)
        if rows:
            Console().print(calls_table(rows))
            save(report, folder.parent / "gpu.png")
        Console().print(summary(report))
    if any(stage["outcome"] not in ("passed", LACKS) for stage in report["stages"].values()):
        sys.exit(1)


def about() -> dict:
    """The machine."""
    on_card = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_card else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_card else None,
        "TORCH_DIST_USE_NCCL2": os.environ.get("TORCH_DIST_USE_NCCL2"),  # which class of groups "nccl" is
        "cupy": machine.report()["packages"]["cupy"],
        "python": platform.python_version(),
        "command": "python benchmarks/gpu.py",
    }


if __name__ == "__main__":
    main()
