"""`ncz enable` and `ncz disable`: whether all scripts of this Python environment honour our key under DeepSpeed.

Python runs the lines of a .pth file in site-packages whenever it starts. Ours imports a small module beside it, which
waits for DeepSpeed to be imported: ncz_plugins/deepspeed/on_import.py. The module is a copy, so that Python still
starts without a complaint once ncz_plugins is uninstalled.
"""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
from pathlib import Path

from ..core.config import DEEPSPEED_KEY
from ..core.errors import UnsupportedError

HOOK = Path(__file__).parents[1] / "deepspeed" / "on_import.py"
MODULE = "_ncz_plugins_on_import"
PTH = "ncz_plugins_on_import.pth"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add both commands to the parser of `ncz`."""
    parser = commands.add_parser("enable", help=f'have every DeepSpeed script of this Python honour "{DEEPSPEED_KEY}"')
    parser.set_defaults(run=enable)
    parser = commands.add_parser("disable", help="take `ncz enable` back")
    parser.set_defaults(run=disable)


def enable(options: argparse.Namespace) -> None:
    """Write the two files."""
    folder = next((each for each in _folders() if os.access(each, os.W_OK)), None)
    if folder is None:
        raise UnsupportedError(
            f"{' and '.join(map(str, _folders()))} can't be written to: use a virtual environment, or start scripts "
            "with `deepspeed --module ncz_plugins.deepspeed.launch`"
        )
    (folder / f"{MODULE}.py").write_text(HOOK.read_text())
    (folder / PTH).write_text(f"import {MODULE}\n")  # last: from here on Python imports the other file
    print(f'"{DEEPSPEED_KEY}" is honoured in every script that {sys.executable} runs: {folder / PTH}')
    print("Do the same on every machine of a training. `ncz disable` takes it back.")


def disable(options: argparse.Namespace) -> None:
    """Remove the two files wherever they are."""
    found = enabled()
    for file in found:
        file.unlink()
        file.with_name(f"{MODULE}.py").unlink(missing_ok=True)
        print(f"removed {file}")
    if not found:
        print("was not enabled")


def enabled() -> list[Path]:
    """The .pth files that are there."""
    return [folder / PTH for folder in _folders() if (folder / PTH).exists()]


def _folders() -> list[Path]:
    """Where this Python looks for .pth files."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(each) for each in (sysconfig.get_path("purelib"), *own)]
