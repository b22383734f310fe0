"""The demonstration: the same GPT trained twice with the real `deepspeed` launcher, plain and with "ncclz".

    python examples/demo.py            (or `make demo`, which also sets up the environment)

Shows the progress, ends with a table, and leaves in results/: demo.png, demo.json, and each run's log and JSON lines.
The last steps go through connections that the kernel limits to 100 Mbit/s, to show what a slow network gains.
"""

import argparse
import contextlib
import fcntl
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

from matplotlib.figure import Figure
from network import SLOW_MBITS, can_limit_connections
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.cli.picture import COLORS, finish, new_figure, save_figure
from ncz_plugins.version import __version__

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
SLOW_STEPS = 20  # at the end of each run, or half of them if there are fewer than 40
LAST_STEPS = 10  # the final training loss is the mean over this many steps
FOREIGN_TRAFFIC = 0.05  # above this difference of counted and claimed ratio, other programs' bytes were counted too
LOG_TAIL = 40  # lines of the launcher's log shown when it fails

console = Console()


class Stopped(Exception):
    """A signal that ends the demonstration; its number is the argument."""


class DemoError(Exception):
    """What ends the demonstration; the message says what to do, or shows the end of a log."""


@dataclass
class Run:
    """One training: what was started and what it wrote. The last ``slow`` steps are those behind the slow link."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    slow: int
    steps: list[dict]
    final: dict

    def series(self, key: str) -> list[float]:
        return [record[key] for record in self.steps]

    def failure(self, how: str) -> DemoError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        return DemoError(f"{tail}\nThe {self.name} run {how}. The end of its log is above, all of it in {self.log}")

    def summary(self) -> dict:
        """The figures of the table.

        Bytes are those of all ranks together. Bytes and seconds are medians over the steps, since anything else on
        the machine can send through the same interface and use the same cores.
        """
        seconds = self.series("seconds")
        fast, slow = seconds[: len(seconds) - self.slow], seconds[len(seconds) - self.slow :]
        return {
            "training_loss": statistics.fmean(self.series("loss")[-LAST_STEPS:]),
            "validation_loss": self.final["validation_loss"],
            "interface_bytes_per_step": statistics.median(self.series("interface_bytes")),
            "compression_ratio": self.final["compression"]["ratio"] if "compression" in self.final else None,
            "slow_step_seconds": statistics.median(slow) if slow else None,
            "step_seconds": statistics.median(fast),
            "replicas_identical": self.final["replicas_identical"],
        }


def two_or_more(word: str) -> int:
    if (number := int(word)) < 2:
        raise argparse.ArgumentTypeError(f"{number} is too few: give 2 or more")
    return number


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=two_or_more, default=120, help="optimizer steps of each run (default: 120)")
    parser.add_argument("--ranks", type=two_or_more, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds allowed for each run (default: 900)")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for the results")
    parser.add_argument("--plain", type=Path, default=EXAMPLES / "deepspeed_plain.json", help="DeepSpeed config")
    parser.add_argument("--ncclz", type=Path, default=EXAMPLES / "deepspeed_ncclz.json", help="DeepSpeed config")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ running


@contextlib.contextmanager
def alone_in(folder: Path):
    """Hold a folder, so that a second demonstration does not write the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = open(folder / ".lock", "w")
    except OSError as error:
        raise DemoError(f"Can't write to {folder}: {error.strerror}; give another folder as --output") from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(
                f"Another demonstration writes to {folder}: wait for its end, as both would share the cores, or give "
                "another folder as --output"
            ) from None
        yield


def slow_steps(arguments) -> tuple[int, str]:
    """How many steps at the end go through a slow link, and why there are none."""
    if arguments.ranks > 2:
        return 0, "More than two ranks have several connections each, and only connections can be limited"
    if not can_limit_connections():
        return 0, "This system's kernel does not limit connections (SO_MAX_PACING_RATE)"
    return min(SLOW_STEPS, arguments.steps // 2), ""


@contextlib.contextmanager
def launched(run: Run):
    """Start the launcher in a process group of its own, and leave nothing of it running."""
    with open(run.log, "w") as output:
        try:
            process = subprocess.Popen(
                run.command,
                cwd=ROOT,
                env=os.environ | run.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise DemoError(
                f"DeepSpeed's launcher is not here: {run.command[0]}. `make demo` installs it into .venv and "
                f"runs this; for another Python: pip install '{ROOT}[deepspeed,plot]'"
            ) from None
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow(process: subprocess.Popen, run: Run, path: Path, timeout: float):
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
                raise run.failure(f"was not ready after {timeout:.0f} s; allow more with --timeout")
            time.sleep(0.1)


def train(name: str, config: Path, arguments, slow: int, show) -> Run:
    """Run one training under the launcher, calling ``show`` with each step's number, from 1 on, and its words."""
    records = arguments.output / f"{name}.jsonl"
    records.write_text("")
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(arguments.ranks)),
        *("--master_port", str(free_port())),
        str(EXAMPLES / "train_deepspeed.py"),
        *("--deepspeed_config", str(config)),
        *("--steps", str(arguments.steps)),
        *("--slow-steps", str(slow)),
        *("--seed", str(arguments.seed)),
        *("--log-file", str(records)),
    ]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = Run(name, command, environment, arguments.output / f"{name}.log", slow, steps=[], final={})
    with launched(run) as process:
        for record in follow(process, run, records, arguments.timeout):
            if "step" in record:
                run.steps.append(record)
                link = f", at {SLOW_MBITS} Mbit/s" if record["step"] >= arguments.steps - slow else ""
                show(record["step"] + 1, f"loss {record['loss']:.3f}{link}")
            else:
                run.final = record
    if process.returncode:
        raise run.failure(f"ended with exit status {process.returncode}")
    return run


def train_with_progress(name: str, config: Path, arguments, slow: int) -> Run:
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

            def show(done, status):
                progress.update(task, total=arguments.steps, completed=done, status=status)

            return train(name, config, arguments, slow, show)

    def show(done, status):
        if done % 10 == 0 or done == arguments.steps:
            console.print(f"{name}: step {done} of {arguments.steps}, {status}")

    console.print(f"{name}: starting the launcher")
    return train(name, config, arguments, slow, show)


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

    def times(words):
        return lambda a, b: f"{a / b:.1f} x {words}"

    def nothing(a, b):
        return ""

    if plain["slow_step_seconds"]:
        row(f"step at {SLOW_MBITS} Mbit/s (median)", "slow_step_seconds", "{:.2f} s".format, times("as fast"))
    row(
        "gradient bytes sent per step (median)",
        "interface_bytes_per_step",
        lambda value: f"{value / 1e6:.2f} MB",
        times("fewer"),
    )
    row("compression ratio by the statistics", "compression_ratio", "{:.2f}".format, nothing)
    row(f"training loss (last {LAST_STEPS} steps)", "training_loss", "{:.4f}".format, percent)
    row("validation loss", "validation_loss", "{:.4f}".format, percent)
    row("step as fast as memory (median)", "step_seconds", "{:.2f} s".format, percent)
    row("replicas bit-identical", "replicas_identical", lambda value: "yes" if value else "NO", nothing)
    return result


def draw(document: dict) -> Figure:
    """Bars of a step's time behind the slow link, if there was one, and of its bytes; both loss curves.

    Args:
        document: {"runs": {name: summary with "losses"}}.
    """
    runs = document["runs"]
    bars = [("gradient bytes of a step, all ranks", "interface_bytes_per_step", 1e6, "MB")]
    if runs["plain"]["slow_step_seconds"]:
        bars.insert(0, (f"time of a step at {SLOW_MBITS} Mbit/s", "slow_step_seconds", 1, "s"))
    figure, (*panels, losses) = new_figure(len(bars) + 1, height=1.9)
    losses.get_gridspec().set_height_ratios([1] * len(bars) + [2])
    for axes, (title, key, unit, name) in zip(panels, bars):
        values = [run[key] / unit for run in runs.values()]
        drawn = axes.barh(list(runs), values, color=[COLORS[run] for run in runs])
        axes.bar_label(drawn, fmt=f"{{:.2f}} {name}", padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.grid(visible=False)
        axes.xaxis.set_visible(False)
        finish(axes, title)
    for (name, run), width in zip(runs.items(), (4, 1.4)):
        steps = range(1, len(run["losses"]) + 1)
        losses.plot(steps, run["losses"], label=name, color=COLORS[name], linewidth=width)
    losses.set(xlabel="step", ylabel="nats per byte")
    finish(losses, "training loss")
    return figure


def versions() -> dict:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")}
    return {
        "ncz_plugins": __version__,
        **packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def report(plain: Run, ncclz: Run, arguments, why_not_slow: str):
    summaries = {run.name: run.summary() for run in (plain, ncclz)}
    picture, numbers = arguments.output / "demo.png", arguments.output / "demo.json"
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
    shown = {run.name: summaries[run.name] | {"losses": run.series("loss")} for run in (plain, ncclz)}
    save_figure("--output", picture, lambda: draw({"runs": shown}))

    console.print(table(summaries["plain"], summaries["ncclz"], arguments))
    if why_not_slow:
        console.print(f"{why_not_slow}, so there is no step behind a slow link.", style="yellow")
    console.print(
        "Bytes are those of all ranks, counted by the kernel at the network interface during the backward pass. "
        f"At {SLOW_MBITS} Mbit/s the kernel limits what each connection sends. As fast as memory, on the loopback, "
        "a step shows what coding costs."
    )
    counted = summaries["plain"]["interface_bytes_per_step"] / summaries["ncclz"]["interface_bytes_per_step"]
    claimed = summaries["ncclz"]["compression_ratio"] or 1.0
    if abs(counted / claimed - 1) > FOREIGN_TRAFFIC:
        console.print(
            f"The counted bytes shrank {counted:.2f}-fold, but the statistics say {claimed:.2f}: most likely other "
            "programs use the same interface. Repeat this on a quiet machine.",
            style="yellow",
        )
    install = f"pip install '{ROOT}[deepspeed]'"
    script, config = "import ncz_plugins.deepspeed", '"communication_compression": "ncclz",'
    console.print(
        f"Figures: {numbers}\nPicture: {picture}\n\nIn a DeepSpeed project of your own, three lines:\n\n"
        f"    {install}\n    {script:<40} in the script\n"
        f"    {config:<40} in its DeepSpeed JSON, at the top level",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def stop(number: int, _) -> None:
    """Unwind, so that the launcher is stopped as well."""
    raise Stopped(number)


def main() -> int:
    arguments = parse_arguments()
    arguments.output = arguments.output.resolve()
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(ending, stop)
    try:
        with alone_in(arguments.output):
            slow, why_not = slow_steps(arguments)
            configs = {"plain": arguments.plain, "ncclz": arguments.ncclz}
            runs = [train_with_progress(name, file.resolve(), arguments, slow) for name, file in configs.items()]
            report(*runs, arguments, why_not)
    except Stopped as stopped:
        (number,) = stopped.args
        with contextlib.suppress(OSError):  # the terminal is gone after a hang-up
            console.print(f"stopped by {signal.Signals(number).name}, and so are the training processes")
        return 128 + number
    except DemoError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
