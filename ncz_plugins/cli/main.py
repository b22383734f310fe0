"""Entry point of the `ncz` command: the parser of all commands, and exit codes.

Every command is a module or package of `cli` with `add_parser(commands)` and `run(options)`. None imports torch before
its `run`, so that the start is quick.

Exit codes: 0 success, 2 a mistake of the user (message on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import shlex
import sys

from ..core.errors import NczError
from ..version import __version__
from . import check, codec, enable, info, patch, perf, plan, report, schema, tune
from .output import list_commands, messages_apart

_OBJECTS_BETWEEN_COLLECTIONS = 100_000  # of Python's garbage collector
# How to get a package that is missing. pip can't compile Horovod for today's torch.
_REMEDIES = {"horovod": "`python tools/horovod_wheel.py` in the repository compiles it"}

COMMANDS = (info, check, enable, codec, plan, perf, tune, report, patch, schema)


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (default: sys.argv) and return the exit code."""
    # Imports make half a million objects that stay. Looking for garbage among them takes a sixth of torch's import.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):  # None if the parent process has closed it
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")  # for file names that the terminal's encoding lacks
    options = build_parser().parse_args(arguments)
    options.command = shlex.join(["ncz", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        files = {name: getattr(options, key) for name, key in options.outputs.items()}
        with messages_apart(files, has_json=getattr(options, "json", False)):
            options.run(options)
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _drop_output()
    except (NczError, OSError) as error:
        print(f"ncz: error: {error}", file=sys.stderr)
        _drop_output()
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or __package__).partition(".")[0]
        if package == __package__.partition(".")[0]:
            raise  # a part of this package is missing: no other package would help
        remedy = _REMEDIES.get(package, "`pip install ncz_plugins` brings it")
        print(f"ncz: error: {package} is not installed: {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _drop_output() -> None:
    """Drop buffered output that can't be written: Python would try again at exit, and print a message of its own."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Its result has the function of the command in `run`."""
    parser = argparse.ArgumentParser(
        prog="ncz", description="Compressed collectives for DeepSpeed, Horovod and PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"ncz_plugins {__version__}")
    list_commands(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
