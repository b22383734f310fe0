"""`ncz schema`: the JSON Schema of the configuration, or the table of its settings for the documentation."""

from __future__ import annotations

import argparse
import json

from ..core.config import json_schema, settings
from .output import write_file, yaml_value

_REPLACED = "policies[].quantizer."  # begins the keys of settings that a policy replaces


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("schema", help="the JSON Schema of the configuration, for editors")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/reference/configuration.md instead")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")
    parser.set_defaults(run=run, outputs={"--output": "output"})


def run(options: argparse.Namespace) -> None:
    """Print the schema or the table, or write it to a file. Raises UnsupportedError if the file can't be written."""
    text = settings_table() if options.markdown else json.dumps(json_schema(), indent=2)
    if options.output:
        write_file("--output", options.output, text + "\n")
    else:
        print(text)


def settings_table() -> str:
    """The reference table in Markdown, one row per setting."""
    lines = ["| key: default | allowed | meaning |", "|---|---|---|"]
    # One row stands for all settings that a policy replaces: `quantizer` lists what each of them allows.
    replaced = [key.removeprefix(_REPLACED) for key, *_ in settings(of_elements=True) if key.startswith(_REPLACED)]
    for key, default, allowed, description in settings(of_elements=True):
        if key == _REPLACED + replaced[0]:
            lines.append(f"| `{_REPLACED[:-1]}: {{}}` | {', '.join(replaced)} | Replaces settings of `quantizer`. |")
        if not key.startswith(_REPLACED):
            lines.append(f"| `{key}: {yaml_value(default)}` | {allowed} | {description} |")
    return "\n".join(lines)
