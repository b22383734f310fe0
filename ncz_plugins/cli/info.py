"""`ncz info`: what this machine has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from . import machine
from .output import grid, print_json, unbroken_console


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("info", help="what this machine has: versions, kernels, CPU, GPUs, backends")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Show the facts about this machine."""
    report = machine.report()
    if options.json:
        print_json(report)
    else:
        unbroken_console().print(grid(rows(report)))


def rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines (name, value) from what `machine.report` returned."""
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
    yield "ncz enable", ", ".join(report["enabled"]) or "no: scripts must import ncz_plugins.deepspeed"
    for name, found in report["compilers"].items():
        yield name, f"{found['version']} ({found['path']})" if found else "not found"
