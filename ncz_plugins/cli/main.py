"""The `ncz` command: what this machine has, whether a configuration is valid, its JSON Schema, what data would
compress to, how fast collectives are, patches of weights, and whether scripts that don't know of us honour our key.

Every command is a module or a package of `cli` that has `add_parser(commands)` and `run(options)`. To keep the start
quick, none of them imports torch before its `run`.

Exit codes: 0 success, 2 a mistake of the user (the message is on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from ..core.errors import NczError
from ..version import __version__
from . import check, codec, enable, info, patch, perf, plan, report, schema, tune

COMMANDS = (info, check, enable, codec, plan, perf, tune, report, patch, schema)


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own) and return the exit code."""
    options = build_parser().parse_args(arguments)
    options.command = shlex.join(["ncz", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.run(options)
        if sys.stdout:  # None if whoever started this has closed it
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; spare Python's own flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (NczError, OSError) as error:
        print(f"ncz: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it parses has the command's function in `run`."""
    parser = argparse.ArgumentParser(
        prog="ncz", description="Compressed collectives for DeepSpeed, Horovod and PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"ncz_plugins {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
