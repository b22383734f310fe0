"""The `ncz` command: what this machine has, whether a configuration is valid, its JSON Schema, what data would
compress to, and how fast collectives are.

Exit codes: 0 success, 2 a mistake of the user (the message is on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.config import DEEPSPEED_KEY, Config
from ..core.config import model as configuration
from ..core.config.documents import read_document
from ..core.errors import ConfigError, NczError, UnsupportedError
from ..core.tuning.choices import Tuning
from ..version import __version__
from .perf import COLLECTIVES, DATA

if TYPE_CHECKING:
    from .codec import Trial
    from .codec.peers import Result
    from .codec.speed import Speeds

_NO_BREAKS = 10_000  # columns of a table that nobody looks at on a screen


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own) and return the exit code."""
    options = _parser().parse_args(arguments)
    options.command = shlex.join(["ncz", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; spare Python's own flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (NczError, OSError) as error:
        print(f"ncz: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ncz", description="Compressed collectives for DeepSpeed and Horovod.")
    parser.add_argument("--version", action="version", version=f"ncz_plugins {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what this machine has: versions, kernels, CPU, GPUs, backends")
    info.add_argument("--json", action="store_true", help="the same as JSON")
    info.set_defaults(run=_info)

    check = commands.add_parser("check", help="validate a configuration and print the effective settings")
    check.add_argument("file", help="one of ours (.yaml, .yml, .json), or a DeepSpeed configuration (.json)")
    check.add_argument(
        "--model",
        metavar="SPEC",
        help="show instead what each parameter of a model gets: FILE.py:NAME or package.module:NAME, where NAME is an "
        "nn.Module or makes one without arguments, and may be left out if it is the only one; this runs the file",
    )
    check.add_argument("--step", metavar="N", help="with --model: in this step, from 0; else the first after warm-up")
    check.set_defaults(run=_check)

    codec = commands.add_parser("codec", help="what an array would compress to: ratio, error, speed")
    codec.add_argument("file", metavar="FILE.npy", help="float16, float32 or float64, of any shape")
    codec.add_argument(
        "--bound", metavar="MODE:VALUE", help="error bound: rms:0.25, rel:1e-3, range:1e-4, abs:0.01 ..."
    )
    codec.add_argument("--block", metavar="N", help="elements that share one scale; 0: all of them")
    codec.add_argument("--quantizer", metavar="KIND", help="error_bound, stochastic, lossless")
    codec.add_argument("--coder", metavar="NAME", help="auto, raw, fixed, huffman, rans")
    codec.add_argument("--predictor", metavar="NAME", help="auto, none, delta")
    codec.add_argument("--link", metavar="GBIT", help="Gbit/s that coder auto reckons with")
    codec.add_argument("--frame", metavar="SIZE", help="input bytes per frame, such as 1MiB")
    codec.add_argument("--config", metavar="FILE", help="take the settings from here; the options above go first")
    codec.add_argument("--json", action="store_true", help="the same as JSON, without --compare")
    codec.add_argument("--plot", metavar="FILE.png", help="also draw ratio against bound")
    codec.add_argument("--compare", action="store_true", help="also run zstd, lz4, blosc2, zfp and SZ3")
    codec.set_defaults(run=_codec)

    perf = commands.add_parser(
        "perf",
        help="how fast a collective is: compressed, plain and by other ways, over slow links too",
        epilog="data: " + "; ".join(f"{name}: {what}" for name, what in DATA.items()),
    )
    perf.add_argument("collective", choices=COLLECTIVES)
    perf.add_argument("--ranks", metavar="N", help="processes to start, 2 unless told; a launcher's ranks are taken")
    perf.add_argument("--sizes", metavar="FROM:TO", default="64K:64M:4", help="64K:256M, 64K:64M:4 (steps) or 64K,1M")
    perf.add_argument("--link", metavar="RATE", help="links of 1gbit, 100mbit, unlimited, or a list of these; as root")
    perf.add_argument("--ranks-per-node", metavar="K", help="how many ranks share a link, 1 unless told")
    perf.add_argument("--peers", metavar="NAMES", default="none", help="a,b,c, all or none, beside plain and ncz")
    perf.add_argument("--data", metavar="NAME", default="gradient", help=f"{', '.join(DATA)} or FILE.npy; see below")
    perf.add_argument("--bound", metavar="MODE:VALUE", help="error bound: rms:0.25, rel:1e-3, range:1e-4, abs:0.01 ...")
    perf.add_argument("--config", metavar="FILE", help="take the settings from here; --bound goes first")
    perf.add_argument("--repeat", metavar="N", help="rounds that are timed; unless told, what 2 seconds hold, 5 to 100")
    perf.add_argument("--json", action="store_true", help="everything as JSON")
    perf.add_argument("--plot", metavar="FILE.png", help="also draw speed-up against size and link")
    perf.add_argument("--trace", metavar="FILE.json", help="also record one call of the largest size, for Perfetto")
    perf.set_defaults(run=_perf)

    tune = commands.add_parser("tune", help="measure link and codec, and write a file that a configuration can name")
    tune.add_argument("--output", metavar="FILE.json", required=True, help="the file to write")
    tune.add_argument("--ranks", metavar="N", help="processes to start, 2 unless told; a launcher's ranks are taken")
    tune.add_argument("--link", metavar="RATE", help="a link of 1gbit, 100mbit ... between the ranks, to try; as root")
    tune.add_argument("--ranks-per-node", metavar="K", help="how many ranks share such a link, 1 unless told")
    tune.add_argument("--config", metavar="FILE", help="for the quantizer, the coder and the hierarchy of this one")
    tune.add_argument("--seconds", metavar="S", type=float, help="time for measuring, 40 unless told")
    tune.set_defaults(run=_tune)

    report = commands.add_parser("report", help="what the records of a training say, and what limited it")
    report.add_argument("file", metavar="RUN.jsonl", help="the file that statistics.jsonl named")
    report.add_argument("--from", dest="first", metavar="STEP", type=int, help="leave out the steps before this one")
    report.add_argument("--to", dest="last", metavar="STEP", type=int, help="leave out the steps after this one")
    report.add_argument("--json", action="store_true", help="the same as JSON")
    report.add_argument("--plot", metavar="FILE.png", help="also draw ratio, bytes, error and times against the steps")
    report.set_defaults(run=_report)

    schema = commands.add_parser("schema", help="the JSON Schema of the configuration, for editors")
    schema.add_argument("--markdown", action="store_true", help="the table of docs/reference/configuration.md instead")
    schema.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")
    schema.set_defaults(run=_schema)
    return parser


# ------------------------------------------------------------------ ncz info


def _info(options: argparse.Namespace) -> None:
    from . import machine  # imports torch, which takes seconds and which no other command needs

    report = machine.report()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in _rows(report):
            table.add_row(Text(name, style="bold"), Text(value))
        Console().print(table)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report as (name, value) lines for people."""
    yield "ncz_plugins", report["ncz_plugins"]
    yield "Python", f"{report['python']['version']} ({report['python']['executable']})"
    yield "platform", report["platform"]
    yield "torch, numpy", f"{report['torch']}, {report['numpy']}"
    cpu = report["cpu"]
    yield "CPU", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"
    yield "CPU features", " ".join(cpu["features"]) or "none that the kernels use"
    kernels = report["kernels"]
    for name, status in kernels["status"].items():
        yield f"kernels: {name}", status + (" (in use)" if name == kernels["in_use"] else "")
    if "error" in kernels:
        yield "kernels", kernels["error"]
    yield "kernels: cuda", report["cuda_kernels"]
    for index, gpu in enumerate(report["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        yield f"GPU {index}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}"
    if not report["gpus"]:
        yield "GPU", "none"
    yield "CUDA", report["cuda"] or "not in this build of torch"
    yield "NCCL", report["nccl"] or "not in this build of torch"
    yield "torch.distributed", ", ".join(name for name, built in report["distributed"].items() if built) or "none"
    for name, version in report["packages"].items():
        yield name, version or "not installed"
    for name, found in report["compilers"].items():
        yield name, f"{found['version']} ({found['path']})" if found else "not found"


# ------------------------------------------------------------------ ncz check


def _check(options: argparse.Namespace) -> None:
    if options.step is not None and not options.model:
        raise ConfigError("--step says for which step --model shows the treatment: give both, or neither")
    config, of_deepspeed = _load(options.file)
    if options.model:
        _check_model(options, config, of_deepspeed)
        return
    tuned = config.transport.tuning and Tuning.read(config.transport.tuning)
    verdict = f"'{DEEPSPEED_KEY}' is valid (the rest is for DeepSpeed to check)" if of_deepspeed else "valid"
    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", ""):
        table.add_column(heading)
    for key, default, _, _ in configuration.settings():
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        mark = "default" if value == default else f"default: {_show(default)}"
        table.add_row(key, Text(_show(value)), Text(mark))  # Text, as rich takes a bare "[...]" for markup
    console = Console()
    console.print(Text(f"{options.file}: {verdict}"))
    console.print(Text(config.describe()))
    if tuned:
        console.print(Text(f"{config.transport.tuning}: {tuned.describe()}"))
    console.print()
    console.print(table)


def _check_model(options: argparse.Namespace, config: Config, of_deepspeed: bool) -> None:
    step = config.steps.warmup if options.step is None else _number(options.step)
    if type(step) is not int or step < 0:
        raise ConfigError(f"--step {options.step} is not allowed; allowed: an integer, 0 or more")
    from .check import model, table, treatments  # imports torch

    name, found = model.load_model(options.model)
    rows = treatments.rows(found, config, step)
    # What a pipe takes need not fit a screen.
    console = Console(width=None if sys.stdout.isatty() else _NO_BREAKS)
    elements = sum(row.numel for row in rows)
    console.print(Text(f"{options.file}: {config.describe()}"))
    console.print(Text(f"{name} in step {step}: {len(rows):,} parameters, {elements:,} elements"))
    if of_deepspeed:
        console.print(Text("dtypes are the parameters' own; DeepSpeed may reduce in another (bf16, fp16, ...)"))
    console.print()
    table.show(console, rows, treatments.matches(found, config), config)


def _load(file: str) -> tuple[Config, bool]:
    """What the file holds, and whether it is a DeepSpeed configuration."""
    document = read_document(file)
    if configuration.is_deepspeed(document):
        return _of_deepspeed(document, file), True
    return Config.load(Path(file)), False


def _of_deepspeed(document: dict[str, Any], file: str) -> Config:
    """What DeepSpeed would be given; `ConfigError` also if compression is off, as that is worth knowing."""
    try:
        source = configuration.find_in_deepspeed(document)
        if source is None:
            remedy = f'"{DEEPSPEED_KEY}": "{configuration.SHORT_FORM}"'
            how = "is switched off" if DEEPSPEED_KEY in document else "is missing"
            raise ConfigError(f"'{DEEPSPEED_KEY}' {how}: training would be uncompressed; add {remedy} at the top level")
        return Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _show(value: object) -> str:
    """A value as it would stand in a YAML file."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(each if isinstance(each, str) else each.describe() for each in value)}]"
    return str(value)


# ------------------------------------------------------------------ ncz codec


def _codec(options: argparse.Namespace) -> None:
    config = _codec_config(options)
    if options.json and options.compare:
        raise ConfigError("--json has the keys of one measurement, it does not go with --compare: leave one out")
    from . import codec as trial  # imports torch, as do the others
    from .codec import peers, plot, speed

    if options.plot:
        plot.check(options.plot)
    array = trial.read_array(options.file)
    outcome = trial.run(array, config)
    if options.plot and outcome.entropy_bits is None:
        raise UnsupportedError("--plot draws codes, and there are none: the array is empty or held without loss")
    compare = options.compare and array.size > 0
    speeds, others = peers.compare(outcome) if compare else (speed.speeds(outcome)[0], [])
    if options.json:
        print(json.dumps(_codec_json(outcome, speeds), indent=2))
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in _codec_rows(outcome, speeds):
            table.add_row(Text(name, style="bold"), Text(value))
        console = Console()
        console.print(Text(f"{options.file}: {array.size:,} {array.dtype}, {array.nbytes / 1e6:,.1f} MB"))
        console.print(Text(config.describe()))
        console.print()
        console.print(table)
        if compare:
            console.print()
            console.print(_codec_beside(outcome, speeds, others))
            for peer in peers.missing():
                console.print(Text(f"{peer.name} is not installed: pip install 'ncz_plugins[compare]'"))
    if options.plot:
        plot.draw(options.plot, array, config)


def _codec_json(outcome: Trial, speeds: Speeds) -> dict[str, Any]:
    """What --json prints; None stands for what is not a finite number, too."""
    report = {
        "ratio": outcome.ratio,
        "bits_per_value": outcome.bits_per_value,
        "entropy_bits": outcome.entropy_bits,
        "max_abs_error": outcome.max_abs_error,
        "bound_abs": outcome.bound_abs,
        "bound_ok": not outcome.blocks_over,
        "encode_gbps": speeds.encode,
        "decode_gbps": speeds.decode,
        "memcpy_gbps": speeds.memcpy,
        "coders": outcome.coders,
        "backend": outcome.codec.backend.name,
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}


def _codec_rows(outcome: Trial, speeds: Speeds) -> Iterator[tuple[str, str]]:
    """The outcome as (name, value) lines for people."""
    if not outcome.array.size:
        yield "bytes", f"{outcome.bytes_out}, for an array without elements"
        return
    if outcome.lossless_because:
        yield "without loss", f"not quantized, as {outcome.lossless_because}"
    yield "ratio", f"{outcome.ratio:.4g}"
    yield "bits per value", f"{outcome.bits_per_value:.4g}, with headers and steps"
    if outcome.entropy_bits is not None:
        yield "entropy", f"{outcome.entropy_bits:.4g} bits per code, order 0"
    kept = f"outside the bound in {outcome.blocks_over}" if outcome.blocks_over else "within the bound in each"
    yield "maximum error", f"{outcome.max_abs_error:.4g}, {kept} of {outcome.bounds.size:,} blocks"
    if math.isfinite(outcome.bound_abs):
        yield "largest bound", f"{outcome.bound_abs:.4g}"
    for name, counts in (("coders", outcome.coders), ("predictors", outcome.predictors)):
        for value, frames in counts.items():
            bar = "\N{FULL BLOCK}" * max(1, round(20 * frames / len(outcome.frames)))
            yield name, f"{value:8}{frames:6,} of {len(outcome.frames):,} frames  {bar}"
            name = ""
    link = 8000 / outcome.codec.coding.costs.link
    yield "link", f"{link:g} Gbit/s, which coder and predictor auto reckon with"
    for name in ("encode", "decode", "measuring"):
        gbps = getattr(speeds, name)
        yield name, f"{gbps:.3g} GB/s, {gbps / speeds.memcpy:.2f} of memcpy"
    yield "memcpy", f"{speeds.memcpy:.3g} GB/s, all on one core"
    yield "kernels", outcome.codec.backend.name


def _codec_beside(outcome: Trial, speeds: Speeds, others: list[Result]) -> Table:
    """Ours and the other compressors."""
    notes = [f"{r.peer.name}: {r.peer.settings}" for r in others]
    table = Table(box=None, pad_edge=False, caption="; ".join(notes), caption_justify="left")
    for heading in ("", "ratio", "bits/value", "encode", "decode", "max error", "of bound"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    own = (outcome.ratio, outcome.bits_per_value, speeds.encode, speeds.decode)
    rows = [("ncz", *own, outcome.max_abs_error, outcome.of_bound)]
    for r in others:
        rows.append((r.peer.name, r.ratio, r.bits_per_value, r.encode, r.decode, r.max_abs_error, r.of_bound))
    for name, ratio, bits, encode, decode, error, of_bound in rows:
        speed = f"{encode:.3g} GB/s", f"{decode:.3g} GB/s"
        table.add_row(name, f"{ratio:.4g}", f"{bits:.4g}", *speed, f"{error:.4g}", f"{of_bound:.3f}")
    return table


def _codec_config(options: argparse.Namespace) -> Config:
    """The settings of --config, or the default ones, with those of the other options in their place."""
    given = {
        "quantizer": {"kind": options.quantizer, **_bound(options.bound), "block": _number(options.block)},
        "entropy": {"coder": options.coder, "predictor": options.predictor},
        "transport": {"link_gbps": _number(options.link), "frame_bytes": _number(options.frame)},
    }
    config = _settings(options.config, given)
    if config.quantizer.kind == "lossless" and (options.bound or options.block):
        raise ConfigError("--bound and --block have no meaning with a quantizer that keeps every bit: lossless")
    return config


def _settings(file: str | None, given: dict[str, dict[str, Any]]) -> Config:
    """The settings of a file, or the default ones, with those that are given and not None in their place."""
    settings = (_load(file)[0] if file else Config()).model_dump(mode="json")
    for section, values in given.items():
        settings[section] |= {name: value for name, value in values.items() if value is not None}
    return Config(**settings)


def _bound(text: str | None) -> dict[str, Any]:
    """The settings that MODE:VALUE stands for; none for None."""
    if text is None:
        return {}
    mode, colon, value = text.partition(":")
    if not (mode and colon and value):
        raise ConfigError(f"--bound: '{text}' is not MODE:VALUE, such as rms:0.25 or range:1e-3")
    return {"mode": mode, "value": _number(value)}


def _number(text: str | None) -> int | float | str | None:
    """As a YAML file would have it; what is no number, `Config` explains."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text


# ------------------------------------------------------------------ ncz perf


def _perf(options: argparse.Namespace) -> None:
    config = _settings(options.config, {"quantizer": _bound(options.bound)})
    if config.quantizer.kind == "lossless" and options.bound:
        raise ConfigError("--bound has no meaning with a quantizer that keeps every bit: lossless")
    from .perf import command  # imports torch

    command.run(options, config, options.command)


# ------------------------------------------------------------------ ncz tune


def _tune(options: argparse.Namespace) -> None:
    config = _settings(options.config, {})
    from .perf import tune  # imports torch

    tune.run(options, config)


# ------------------------------------------------------------------ ncz report


def _report(options: argparse.Namespace) -> None:
    from .report import command  # imports numpy

    command.run(options)


# ------------------------------------------------------------------ ncz schema


def _schema(options: argparse.Namespace) -> None:
    text = settings_table() if options.markdown else json.dumps(configuration.json_schema(), indent=2)
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def settings_table() -> str:
    """The reference table, one row per setting."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, default, allowed, description in configuration.settings(of_elements=True):
        lines.append(f"| `{key}` | `{_show(default)}` | {allowed} | {description} |")
    return "\n".join(lines)
