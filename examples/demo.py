"""The demonstration: the same GPT trained twice with the real `deepspeed` launcher, plain and with "ncclz".

    python examples/demo.py            (or `make demo`, which also sets up the environment)

Shows the progress, ends with a table, and leaves in results/: demo.png, demo.json, and each run's log and JSON lines.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.version import __version__

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
LAST_STEPS = 10  # the final training loss is the mean over this many steps
FOREIGN_TRAFFIC = 0.05  # above this difference of counted and claimed ratio, other programs' bytes were counted too
LOG_TAIL = 40  # lines of the launcher's log shown when it fails

console = Console()


class DemoError(Exception):
    """A run that failed; the message says why and where its log is."""


@dataclass
class Run:
    """One training: what was started and what it wrote."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    steps: list[dict]
    final: dict

    def series(self, key: str) -> list[float]:
        return [record[key] for record in self.steps]

    def summary(self) -> dict:
        """The figures of the table.

        Bytes are those of all ranks together. Bytes and seconds are medians over the steps, since anything else on
        the machine can send through the same interface and use the same cores.
        """
        return {
            "training_loss": statistics.fmean(self.series("loss")[-LAST_STEPS:]),
            "validation_loss": self.final["validation_loss"],
            "interface_bytes_per_step": statistics.median(self.series("interface_bytes")),
            "compression_ratio": self.final["compression"]["ratio"] if "compression" in self.final else None,
            "step_seconds": statistics.median(self.series("seconds")),
            "replicas_identical": self.final["replicas_identical"],
        }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run (default: 150)")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds allowed for each run (default: 900)")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for the results")
    parser.add_argument("--plain", type=Path, default=EXAMPLES / "deepspeed_plain.json", help="DeepSpeed config")
    parser.add_argument("--ncclz", type=Path, default=EXAMPLES / "deepspeed_ncclz.json", help="DeepSpeed config")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ running


@contextlib.contextmanager
def launched(command: list[str], environment: dict[str, str], log: Path):
    """Start the launcher in a process group of its own, and leave nothing of it running."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow(process: subprocess.Popen, path: Path, timeout: float):
    """Yield the records of a JSON-lines file as they are written, until the process has ended."""
    deadline = time.monotonic() + timeout
    partial = ""
    with open(path) as lines:
        while True:
            ended = process.poll() is not None  # asked before reading, so that the last lines are not missed
            while line := lines.readline():
                partial += line
                if partial.endswith("\n"):
                    yield json.loads(partial)
                    partial = ""
            if ended:
                return
            if time.monotonic() > deadline:
                raise DemoError(f"was not ready after {timeout:.0f} s; allow more with --timeout")
            time.sleep(0.1)


def train(name: str, config: Path, arguments, show) -> Run:
    """Run one training under the launcher, calling ``show`` with each step's record."""
    records = arguments.output / f"{name}.jsonl"
    records.write_text("")
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(arguments.ranks)),
        *("--master_port", str(free_port())),
        str(EXAMPLES / "train_deepspeed.py"),
        *("--deepspeed_config", str(config)),
        *("--steps", str(arguments.steps)),
        *("--seed", str(arguments.seed)),
        *("--log-file", str(records)),
    ]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = Run(name, command, environment, arguments.output / f"{name}.log", steps=[], final={})
    with launched(command, environment, run.log) as process:
        for record in follow(process, records, arguments.timeout):
            if "step" in record:
                run.steps.append(record)
                show(record)
            else:
                run.final = record
    if process.returncode:
        raise DemoError(f"ended with exit status {process.returncode}")
    return run


def train_with_progress(name: str, config: Path, arguments) -> Run:
    """Train with a live bar on a terminal, and with a line for every tenth step elsewhere."""
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=None, status="starting the launcher")

            def show(record):
                status = f"loss {record['loss']:.3f}"
                progress.update(task, total=arguments.steps, completed=record["step"] + 1, status=status)

            return train(name, config, arguments, show)

    def show(record):
        done = record["step"] + 1
        if done % 10 == 0 or done == arguments.steps:
            console.print(f"{name}: step {done} of {arguments.steps}, loss {record['loss']:.3f}")

    console.print(f"{name}: starting the launcher")
    return train(name, config, arguments, show)


# ------------------------------------------------------------------------------------------------ reporting


def table(plain: dict, ncclz: dict, arguments) -> Table:
    """The two summaries side by side."""
    result = Table(title=f"Byte-level GPT, {arguments.ranks} ranks, {arguments.steps} steps")
    result.add_column()
    for heading in ("plain", "ncclz", "difference"):
        result.add_column(heading, justify="right")

    def row(label, key, form, difference):
        values = (plain[key], ncclz[key])
        result.add_row(label, *("-" if value is None else form(value) for value in values), difference(*values))

    def percent(a, b):
        return f"{100 * (b - a) / a:+.2f} %"

    def nothing(a, b):
        return ""

    row(f"training loss (last {LAST_STEPS} steps)", "training_loss", "{:.4f}".format, percent)
    row("validation loss", "validation_loss", "{:.4f}".format, percent)
    row(
        "gradient bytes sent per step (median)",
        "interface_bytes_per_step",
        lambda value: f"{value / 1e6:.2f} MB",
        lambda a, b: f"{a / b:.2f} x fewer",
    )
    row("compression ratio by the statistics", "compression_ratio", "{:.2f}".format, nothing)
    row("time per step (median)", "step_seconds", "{:.3f} s".format, percent)
    row("replicas bit-identical", "replicas_identical", lambda value: "yes" if value else "NO", nothing)
    return result


def draw(runs: list[Run], path: Path):
    """Both loss curves, and both runs' bytes per step."""

    def megabytes(run):
        return [value / 1e6 for value in run.series("interface_bytes")]

    figure, (losses, traffic) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = ({"color": "#7f7f7f", "linewidth": 3.0}, {"color": "#d1495b", "linewidth": 1.4})
    for run, style in zip(runs, styles):
        steps = [step + 1 for step in run.series("step")]
        losses.plot(steps, run.series("loss"), label=run.name, **style)
        traffic.plot(steps, megabytes(run), label=run.name, **style)
    losses.set(title="Training loss", xlabel="step", ylabel="nats per byte")
    traffic.set(title="Gradient bytes sent per step, all ranks", xlabel="step", ylabel="MB", yscale="log")
    values = [value for run in runs for value in megabytes(run)]
    traffic.set_ylim(min(values) / 2, max(values) * 2)
    traffic.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    traffic.yaxis.set_major_formatter("{x:g}")
    traffic.yaxis.set_minor_locator(NullLocator())
    for axes in (losses, traffic):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def versions() -> dict:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")}
    return {
        "ncz_plugins": __version__,
        **packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def report(plain: Run, ncclz: Run, arguments):
    summaries = {run.name: run.summary() for run in (plain, ncclz)}
    picture, numbers = arguments.output / "demo.png", arguments.output / "demo.json"
    draw([plain, ncclz], picture)
    details = {
        run.name: {
            "command": shlex.join([*(f"{key}={value}" for key, value in run.environment.items()), *run.command]),
            "summary": summaries[run.name],
            "final": run.final,
            "steps": run.steps,
        }
        for run in (plain, ncclz)
    }
    numbers.write_text(json.dumps({"versions": versions(), "runs": details}, indent=1) + "\n")

    console.print(table(summaries["plain"], summaries["ncclz"], arguments))
    console.print(
        "Bytes are those of all ranks, counted by the kernel at the network interface during the backward pass. The "
        "loopback is as fast as memory, so the time per step shows what coding costs, not what a slow network gains."
    )
    counted = summaries["plain"]["interface_bytes_per_step"] / summaries["ncclz"]["interface_bytes_per_step"]
    claimed = summaries["ncclz"]["compression_ratio"] or 1.0
    if abs(counted / claimed - 1) > FOREIGN_TRAFFIC:
        console.print(
            f"The counted bytes shrank {counted:.2f}-fold, but the statistics say {claimed:.2f}: most likely other "
            "programs use the same interface. Repeat this on a quiet machine.",
            style="yellow",
        )
    console.print(f"Picture: {picture}\nFigures: {numbers}", soft_wrap=True)


def main() -> int:
    arguments = parse_arguments()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so the launcher is stopped too
    name = ""
    try:
        runs = []
        for name, config in (("plain", arguments.plain), ("ncclz", arguments.ncclz)):
            runs.append(train_with_progress(name, config.resolve(), arguments))
    except KeyboardInterrupt:
        console.print("interrupted; the training processes are stopped")
        return 128 + signal.SIGINT
    except DemoError as error:
        log = arguments.output / f"{name}.log"
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        console.print("\n".join(tail), markup=False, highlight=False, soft_wrap=True)
        message = f"[bold red]The {name} run {error}.[/] The end of its log is above, all of it in {log}"
        console.print(message, soft_wrap=True)
        return 1
    report(*runs, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
