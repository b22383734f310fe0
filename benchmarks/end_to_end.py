"""Measures training steps on a slow network: plain, with the framework's own compression, and with ours.

    sudo .venv/bin/python -m benchmarks.end_to_end [--frameworks deepspeed,fsdp] [--link 1gbit] [--rounds 2]

The example GPT (25 M parameters by default) is trained by examples/train_*.py, under DeepSpeed with ZeRO 2, one rank in
each of two network namespaces, whose links have the given rate. Beside plain and compressed runs those which a user can
switch on in the framework itself: gradients cast to 16 bits, in bf16 under DeepSpeed (`communication_data_type`; gloo
adds fp16 far more slowly on a CPU), DDP (a hook) and FSDP2 (`reduce_dtype`), in fp16 under Horovod (`Compression.fp16`,
its only one); and DDP's PowerSGD hook, of rank 4. Under DeepSpeed our compression is tried with and without that of
weights; "deepspeed-bf16" trains in bf16, "deepspeed-zero-3" with ZeRO 3 as well. The kinds take turns, `--rounds`
times; seconds are the median over the steps of all rounds, without the first steps of each. Bytes are what the kernel
counted as sent by rank 0's node. Where bytes are those of gradients depends on the framework: FSDP2's hold the weights
that it gathers in the backward pass. With DiLoCo a step is a round: 10 steps of each replica and one synchronization.
"experts" is the GPT with 4 experts in each layer, half of them on each rank, and the bytes are those of the backward
pass: gradients of weights, and of what went to experts and came back.

Both ranks share this machine's cores with the network, and each computes on one core: absolute times tell little,
their ratios are for a step that computes and communicates in about these shares.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import pictures
from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import Node, bits_per_second, link
from ncz_plugins.cli import machine
from ncz_plugins.cli.picture import COLORS, finish, ink, new_figure, save_figure
from ncz_plugins.core.errors import NczError
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
RANKS = 2
WARMUP = 3  # steps at the start of each run that are not counted: they connect, allocate and compile
LAST_STEPS = 5  # the final training loss is the mean over this many steps


@dataclass
class Runs:
    """All runs of one kind.

    Attributes:
        framework: whose way to share out a training it is, as people write its name.
        name: "plain", "ncclz", the type that the framework casts to, or another compression of its own.
        setting: what was switched on, in the framework's own words.
        command: how each rank was started.
        seconds: of every counted step.
        gradient_bytes: sent by rank 0's node while it reduced gradients, in every counted step.
        bytes_sent: sent by it in all of a step, in every counted step.
        losses: of every step of the last round.
        final: the last record of the last round.
    """

    framework: str
    name: str
    setting: dict[str, Any]
    command: list[str]
    seconds: list[float] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)

    def go(self, records: Path, nodes: list[Node], timeout: float, advance: Callable[[], None]) -> None:
        """Train once, calling `advance` after each step."""
        self.losses = []
        sent = 0

        def take(record: dict[str, Any]) -> None:
            nonlocal sent
            if "step" not in record:
                self.final = record
                return
            before, sent = sent, record["interface_bytes_so_far"]
            self.losses.append(record["loss"])
            if record["step"] >= WARMUP:
                self.seconds.append(record["seconds"])
                self.gradient_bytes.append(record["interface_bytes"])
                self.bytes_sent.append(sent - before)
            advance()

        environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"} if "DeepSpeed" in self.framework else {}
        options = {"nodes": nodes, "horovod": self.framework == "Horovod", "environment": environment}
        run(self.command, RANKS, records, on_record=take, timeout=timeout, **options)

    def summary(self) -> dict[str, Any]:
        """The figures of the table and the picture."""
        return {
            "step_seconds": statistics.median(self.seconds),
            "gradient_bytes_per_step": statistics.median(self.gradient_bytes),
            "bytes_per_step": statistics.median(self.bytes_sent),
            "training_loss": statistics.fmean(self.losses[-LAST_STEPS:]),
            "validation_loss": self.final["validation_loss"],
            "replicas_identical": self.final["replicas_identical"],
            "compression_ratio": self.final.get("compression", {}).get("ratio"),
        }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(FRAMEWORKS)
    parser.add_argument("--frameworks", default=names, metavar="NAMES", help=f"some of {names} (default: all)")
    parser.add_argument("--link", default="1gbit", metavar="RATE", help="of each node's link (default: 1gbit)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    parser.add_argument("--steps", type=int, default=13, help=f"of each run, the first {WARMUP} not counted")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 bytes per rank and step (default: 2)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--heads", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds allowed for each run (default: 300)")
    parser.add_argument("--output", type=Path, help="folder for the results, instead of the committed files")
    arguments = parser.parse_args()
    arguments.frameworks = arguments.frameworks.split(",")
    if unknown := set(arguments.frameworks) - FRAMEWORKS.keys():
        parser.error(f"--frameworks: {', '.join(sorted(unknown))}; choose from {names}")
    if arguments.steps <= WARMUP or arguments.rounds < 1:
        parser.error(f"--steps must be above {WARMUP}, of which none is counted, and --rounds at least 1")
    return arguments


# ------------------------------------------------------------------ what is run


def kinds(arguments: argparse.Namespace, folder: Path) -> list[Runs]:
    """Everything that takes turns; configuration files go to `folder`."""
    return [runs for framework in arguments.frameworks for runs in FRAMEWORKS[framework](arguments, folder)]


def _deepspeed(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    """Training in float32."""
    return _by_key("DeepSpeed", {}, {"bf16": {"communication_data_type": "bf16"}}, arguments, folder)


def _deepspeed_bf16(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    """Training in bfloat16, with float32 masters: gradients and weights travel in bfloat16."""
    return _by_key("DeepSpeed in bf16", {"bf16": {"enabled": True}}, {}, arguments, folder)


def _deepspeed_zero_3(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    """The same with ZeRO 3, which gathers weights in the forward and in the backward pass, and frees them."""
    common = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    return _by_key("DeepSpeed, ZeRO 3", common, {}, arguments, folder)


def _by_key(
    framework: str, common: dict[str, Any], others: dict[str, Any], arguments: argparse.Namespace, folder: Path
) -> Iterator[Runs]:
    """Runs of DeepSpeed: plain, others' compression, ours of gradients, ours of gradients and weights."""
    base = json.loads((EXAMPLES / "deepspeed_plain.json").read_text()) | common
    base["train_micro_batch_size_per_gpu"] = arguments.batch
    ncclz = _ncclz(arguments)
    settings = {
        "plain": {},
        **others,
        "ncclz": {"communication_compression": ncclz},
        "weights too": {"communication_compression": ncclz | {"roles": ["gradient", "parameter"]}},
    }
    for name, setting in settings.items():
        config = _written(base | setting, folder / f"{framework} {name}.json".replace(" ", "_"))
        command = _command(["train_deepspeed.py", "--deepspeed_config", config], arguments, folder)
        yield Runs(framework, name, setting, command)


def _horovod(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    ncclz = _ncclz(arguments)
    settings = {
        "plain": ("none", {}),
        "fp16": ("fp16", {"compression": "hvd.Compression.fp16"}),
        "ncclz": (_written(ncclz, folder / "ncclz.json"), {"compression": f"NCZ({ncclz})"}),
    }
    return _by_argument("Horovod", "train_horovod.py", settings, arguments, folder)


def _ddp(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    ncclz = _ncclz(arguments)
    settings = {
        "plain": ("none", {}),
        "bf16": ("bf16", {"hook": "bf16_compress_hook"}),
        "powersgd": ("powersgd", {"hook": "powerSGD_hook", "matrix_approximation_rank": 4}),
        "ncclz": (_written(ncclz, folder / "ncclz.json"), {"compress": ncclz}),
    }
    return _by_argument("DDP", "train_ddp.py", settings, arguments, folder)


def _fsdp(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    ncclz = _ncclz(arguments)
    settings = {
        "plain": ("none", {}),
        "bf16": ("bf16", {"reduce_dtype": "bfloat16"}),
        "ncclz": (_written(ncclz, folder / "ncclz.json"), {"compress": ncclz}),
    }
    yield from _by_argument("FSDP2", "train_fsdp.py", settings, arguments, folder)
    both = ncclz | {"roles": ["gradient", "parameter"]}
    setting = {"weights too": (_written(both, folder / "both.json"), {"compress": both, "keep_weights": True})}
    yield from _by_argument("FSDP2", "train_fsdp.py", setting, arguments, folder, "--keep-weights")


def _diloco(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    """A step is a round of 10 steps of each replica, at whose end they synchronize."""
    ncclz = _ncclz(arguments)
    settings = {
        "plain": ("none", {}),
        "ncclz": (_written(ncclz, folder / "ncclz.json"), {"CompressedProcessGroup": ncclz}),
    }
    return _by_argument("DiLoCo", "train_diloco.py", settings, arguments, folder)


def _experts(arguments: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    """Experts shared out over the ranks: their tokens travel in the forward and in the backward pass."""
    ncclz = _ncclz(arguments)
    casts = {
        "bf16": ("bf16", {"tokens": "bfloat16", "hook": "bf16_compress_hook"}),
        "fp8": ("fp8", {"tokens": "float8_e4m3fn, a scale for each", "hook": "bf16_compress_hook"}),
    }
    roles = {"roles": ["gradient", "activation"]}
    settings = {"plain": ("none", {}), **casts, "ncclz": (_written(ncclz, folder / "ncclz.json"), ncclz | roles)}
    return _by_argument("experts", "train_experts.py", settings, arguments, folder)


def _by_argument(
    framework: str,
    script: str,
    settings: dict[str, tuple[str, dict[str, Any]]],
    arguments: argparse.Namespace,
    folder: Path,
    *options: str,
) -> Iterator[Runs]:
    """Runs of a script that takes `--compression`, whose value stands in `settings` before what it switches on."""
    for name, (compression, setting) in settings.items():
        line = [script, "--compression", compression, "--batch", str(arguments.batch), *options]
        yield Runs(framework, name, setting, _command(line, arguments, folder))


FRAMEWORKS = {
    "deepspeed": _deepspeed,
    "deepspeed-bf16": _deepspeed_bf16,
    "deepspeed-zero-3": _deepspeed_zero_3,
    "horovod": _horovod,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "diloco": _diloco,
    "experts": _experts,
}


def _ncclz(arguments: argparse.Namespace) -> dict[str, Any]:
    """The default settings, and the link's rate, which Linux does not state for the interface of a namespace."""
    rate = bits_per_second(arguments.link)
    return {"transport": {"link_gbps": rate / 1e9}} if rate else {}


def _written(config: dict[str, Any], path: Path) -> str:
    """The path of a file with these settings."""
    path.write_text(json.dumps(config))
    return str(path)


def _command(script: list[str], arguments: argparse.Namespace, folder: Path) -> list[str]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "layers", "heads", "width")]
    log = ["--log-file", str(folder / "records.jsonl")]
    return [sys.executable, str(EXAMPLES / script[0]), *script[1:], *log, *sizes]


def measure(arguments: argparse.Namespace, folder: Path) -> list[Runs]:
    """All kinds in turns, as often as there are rounds."""
    found = kinds(arguments, folder)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(found) * arguments.rounds * arguments.steps)
        for index in range(arguments.rounds):
            for runs in found:
                progress.update(task, description=f"round {index + 1}: {runs.framework}, {runs.name}")
                with link(RANKS, arguments.link) as nodes:
                    runs.go(folder / "records.jsonl", nodes, arguments.timeout, lambda: progress.advance(task))
    return found


# ------------------------------------------------------------------ the report


def table(found: list[Runs], arguments: argparse.Namespace) -> Table:
    sizes = f"{arguments.layers} layers of width {arguments.width}"
    title = f"GPT with {sizes}, {RANKS} nodes at {arguments.link}"
    result = Table(title=title, box=None, pad_edge=False)
    for heading in ("", "", "step", "speed-up", "gradients", "all sent", "loss", "held out"):
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for runs, summary, speed_up in _compared(found):
        result.add_row(
            runs.framework if runs.name == "plain" else "",
            runs.name,
            f"{summary['step_seconds']:.2f} s",
            f"{speed_up:.2f} x",
            f"{summary['gradient_bytes_per_step'] / 1e6:.1f} MB",
            f"{summary['bytes_per_step'] / 1e6:.1f} MB",
            f"{summary['training_loss']:.4f}",
            f"{summary['validation_loss']:.4f}",
        )
    return result


def _compared(found: list[Runs]) -> Iterator[tuple[Runs, dict[str, Any], float]]:
    """Each kind, its figures, and how many times as fast as the plain one of its framework it is."""
    for runs in found:
        plain = next(other for other in found if other.framework == runs.framework and other.name == "plain")
        summary = runs.summary()
        yield runs, summary, plain.summary()["step_seconds"] / summary["step_seconds"]


def document(found: list[Runs], arguments: argparse.Namespace) -> dict[str, Any]:
    """What the JSON file holds."""
    packages = {name: machine.installed_version(name) for name in ("torch", "deepspeed", "horovod")}
    return {
        "command": shlex.join(["python", "-m", "benchmarks.end_to_end", *sys.argv[1:]]),
        "versions": {"ncz_plugins": __version__, **packages},
        "cpu": machine.cpu(),
        "link": arguments.link,
        "ranks": RANKS,
        "steps": arguments.steps,
        "warm_up_steps": WARMUP,
        "rounds": arguments.rounds,
        "batch": arguments.batch,
        "model": {name: getattr(arguments, name) for name in ("layers", "heads", "width")},
        "runs": [
            {
                "framework": runs.framework,
                "name": runs.name,
                "setting": runs.setting,
                **summary,
                "speed_up": speed_up,
                "seconds": runs.seconds,
                "losses": runs.losses,
            }
            for runs, summary, speed_up in _compared(found)
        ],
    }


def draw(results: dict[str, Any]) -> Figure:
    """Seconds and bytes of a step as bars, a group for each framework; dots are single steps.

    Args:
        results: what `document` returns, and the JSON file holds.
    """
    rows, labels, y = results["runs"], {}, -1.0
    figure, (times, traffic) = new_figure(2, height=0.9 + 0.33 * len(rows))
    for row in rows:
        first = row["name"] == "plain"
        y += 1.6 if first and labels else 1  # a gap between the frameworks
        labels[y] = f"{row['framework']}: plain" if first else row["name"]
        color = COLORS[row["name"]]
        times.barh(y, row["step_seconds"], color=color)
        times.plot(row["seconds"], [y] * len(row["seconds"]), ".", color=ink(), alpha=0.3, markersize=4)
        words = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        times.annotate(f"{row['speed_up']:.2f} x", (0, y), color="white", weight="bold", **words)
        sent, gradients = row["bytes_per_step"] / 1e6, row["gradient_bytes_per_step"] / 1e6
        traffic.barh(y, gradients, color=color)
        traffic.barh(y, sent - gradients, left=gradients, color=color, alpha=0.35)
        traffic.annotate(f"{gradients:.1f} + {sent - gradients:.1f}", (sent, y), **words)
    times.set_xlabel("s")
    traffic.set_xlabel("MB")
    traffic.margins(x=0.28)
    for axes in (times, traffic):
        axes.set_yticks(list(labels), list(labels.values()))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    finish(times, f"time of a step, {results['ranks']} nodes at {results['link']}")
    finish(traffic, "sent per step and node: gradients + all else (pale)")
    return figure


def main() -> int:
    arguments = parse_arguments()
    numbers = (arguments.output or ROOT / "benchmarks" / "results") / "end-to-end.json"
    picture = (arguments.output or pictures.IMAGES) / "end-to-end.png"
    console = Console()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(arguments, Path(folder))
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        return 130
    except NczError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in (numbers, picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    results = document(found, arguments)
    numbers.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.output:
        save_figure("--output", picture, partial(draw, results))
    else:
        pictures.redraw("end-to-end")
    console.print(table(found, arguments))
    console.print(f"Figures: {numbers}\nPicture: {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
