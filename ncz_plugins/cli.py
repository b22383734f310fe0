"""The `ncz` command: what this machine has, whether a configuration is valid, and its JSON Schema.

Exit codes: 0 success, 2 a mistake of the user (the message is on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .core import config as configuration
from .core.config import DEEPSPEED_KEY, Config
from .core.documents import read_document
from .core.errors import ConfigError, NczError
from .version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own) and return the exit code."""
    options = _parser().parse_args(arguments)
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
    check.set_defaults(run=_check)

    schema = commands.add_parser("schema", help="the JSON Schema of the configuration, for editors")
    schema.add_argument("--markdown", action="store_true", help="the table of docs/configuration.md instead")
    schema.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")
    schema.set_defaults(run=_schema)
    return parser


# ------------------------------------------------------------------ ncz info


def _info(options: argparse.Namespace) -> None:
    from .core import system  # imports torch, which takes seconds and which no other command needs

    report = system.report()
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
    document = read_document(options.file)
    if configuration.is_deepspeed(document):
        verdict = f"'{DEEPSPEED_KEY}' is valid (the rest is for DeepSpeed to check)"
        config = _of_deepspeed(document, options.file)
    else:
        verdict = "valid"
        config = Config.load(Path(options.file))
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
    console.print()
    console.print(table)


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
    if value is None:
        return "null"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


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
    for key, default, allowed, description in configuration.settings():
        lines.append(f"| `{key}` | `{_show(default)}` | {allowed} | {description} |")
    return "\n".join(lines)
