"""`ncz enable` and `ncz disable`: whether scripts that don't import ncz_plugins know it, in this Python environment.

When enabled, all scripts honour our key in a DeepSpeed configuration and know the backend "ncz" by its name.

Python runs the lines of .pth files in site-packages at every start. Our .pth file imports a small module beside it, a
copy of on_import.py, which waits until DeepSpeed or torch.distributed is imported. It is a copy so that Python still
starts without an error after ncz_plugins has been uninstalled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import py_compile
import site
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

from ..core.config import DEEPSPEED_KEY
from ..core.errors import UnsupportedError
from ..core.whole_files import write_whole

HOOK = Path(__file__).with_name("on_import.py")
MODULE = "_ncz_plugins_on_import"
PTH = "ncz_plugins_on_import.pth"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add both commands to the parser of `ncz`."""
    parser = commands.add_parser("enable", help=f'have all scripts of this Python know "{DEEPSPEED_KEY}"')
    parser.set_defaults(run=enable)
    parser = commands.add_parser("disable", help="undo `ncz enable`")
    parser.set_defaults(run=disable)


def enable(options: argparse.Namespace) -> None:
    """Write the .pth file, the module, and the module's compiled form."""
    folder = next(filter(_can_be_written, _folders()), None)
    if folder is None:
        raise UnsupportedError(
            f"{' and '.join(map(str, _folders()))} can't be written to: use a virtual environment, or start scripts "
            "with `deepspeed --module ncz_plugins.deepspeed.launch`"
        )
    module = folder / f"{MODULE}.py"
    write_whole(module, HOOK.read_bytes())
    py_compile.compile(module)  # now, as other users of this Python may not be able to write here
    write_whole(folder / PTH, f"import {MODULE}\n")  # last, as from now on every Python imports the module
    print(f"Every script that {sys.executable} runs now knows")
    print(f'- "{DEEPSPEED_KEY}" in a DeepSpeed configuration,')
    print('- torch.distributed.init_process_group("ncz").')
    print(f"This is done by {folder / PTH}.")
    print("Run `ncz enable` on every machine of a training. `ncz disable` undoes it.")


def disable(options: argparse.Namespace) -> None:
    """Remove the files from all folders."""
    found = enabled()
    for file in found:
        file.unlink()
        module = file.with_name(f"{MODULE}.py")
        for each in (module, Path(cache_from_source(module))):
            each.unlink(missing_ok=True)
        print(f"removed {file}")
    if not found:
        print("was not enabled")


def enabled() -> list[Path]:
    """Paths of our .pth files that exist."""
    return [folder / PTH for folder in _folders() if (folder / PTH).exists()]


def _can_be_written(folder: Path) -> bool:
    """Whether files can be written to `folder`. Creates the folder, as a user's own may not exist yet."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _folders() -> list[Path]:
    """Folders in which this Python looks for .pth files."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(each) for each in (sysconfig.get_path("purelib"), *own)]
