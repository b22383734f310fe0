"""The options of `ncz check`, and what it prints without --model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ...core.config import DEEPSPEED_KEY, Config, expanded_path, settings
from ...core.errors import ConfigError
from ...core.tuning.tuning_file import Tuning
from ..output import add_row, table, unbroken_console, yaml_value
from ..settings import load_config, parse_number
from . import buckets


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("check", help="validate a configuration and print the effective settings")
    parser.add_argument("file", help="one of ours (.yaml, .yml, .json), a preset, or a DeepSpeed configuration (.json)")
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="show instead what each parameter of a model gets: FILE.py:NAME or package.module:NAME, where NAME is an "
        "nn.Module or makes one without arguments, and may be left out if it is the only one; this runs the file",
    )
    parser.add_argument("--step", metavar="N", help="with --model: in this step, from 0; else the first after warm-up")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Validate the file, and print its settings or the treatment of a model.

    Raises ConfigError, and UnsupportedError for what DeepSpeed can't serve.
    """
    if options.step is not None and not options.model:
        raise ConfigError("--step says for which step --model shows the treatment: give both, or neither")
    config, deepspeed = load_config(options.file)
    if deepspeed and config.rotates:
        from ...core.training.rotation import refuse  # imports torch

        refuse(config, "DeepSpeed")
    if options.model:
        _show_model(options, config, deepspeed)
    else:
        _show_settings(options.file, config, deepspeed)


def _show_settings(file: str, config: Config, deepspeed: dict[str, Any] | None) -> None:
    tuning = Tuning.read(expanded_path(config.transport.tuning)) if config.transport.tuning else None
    verdict = f"'{DEEPSPEED_KEY}' is valid (the rest is for DeepSpeed to check)" if deepspeed else "valid"
    rows = table("setting", "value", "")
    for key, default, _, _ in settings():
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        add_row(rows, key, yaml_value(value), "default" if value == default else f"default: {yaml_value(default)}")
    console = unbroken_console()
    console.print(Text(f"{file}: {verdict}"))
    console.print(Text(config.describe()))
    if tuning:
        console.print(Text(f"{config.transport.tuning}: {tuning.describe()}"))
    if deepspeed and (warning := buckets.warning(deepspeed, config)):
        console.print(Text(f"warning: {warning}"))
    if deepspeed and (warning := _of_optimizer(deepspeed, config)):
        console.print(Text(f"warning: {warning}"))
    console.print()
    console.print(rows)


def _of_optimizer(deepspeed: dict[str, Any], config: Config) -> str | None:
    """Warning if the optimizer of a DeepSpeed configuration needs a finer bound."""
    optimizer = deepspeed.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(name, str) or "muon" not in name.lower():
        return None
    from ...core.training.muon import advice  # imports torch

    return advice(config, name)


def _show_model(options: argparse.Namespace, config: Config, deepspeed: dict[str, Any] | None) -> None:
    step = config.steps.warmup if options.step is None else parse_number(options.step)
    if type(step) is not int or step < 0:
        raise ConfigError(f"--step must be an integer, 0 or more, got {options.step}")
    from .model import load_model  # these modules import torch
    from .table import show
    from .treatments import matches, rows

    name, model = load_model(options.model)
    treated = rows(model, config, step)
    console = unbroken_console()
    elements = sum(row.numel for row in treated)
    console.print(Text(f"{options.file}: {config.describe()}"))
    console.print(Text(f"{name} in step {step}: {len(treated):,} parameters, {elements:,} elements"))
    if deepspeed:
        console.print(Text("dtypes are the parameters' own; DeepSpeed may reduce in another (bf16, fp16, ...)"))
        if warning := _of_optimizer(deepspeed, config):
            console.print(Text(f"warning: {warning}"))
    console.print()
    show(console, treated, matches(model, config), config)
