"""`ncz enable` and `ncz disable`: whether scripts of this Python environment that don't import us know us.

They then honour our key in DeepSpeed's configuration, and know the backend `ncz` by its name.

Python runs the lines of a .pth file in site-packages whenever it starts. Ours imports a small module beside it, which
waits for DeepSpeed or torch.distributed to be imported: on_import.py. The module is a copy, so that Python still starts
without a complaint once ncz_plugins is uninstalled.
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
    parser = commands.add_parser("disable", help="take `ncz enable` back")
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
    py_compile.compile(module)  # not every user of this Python may be able to write it, or wants to
    write_whole(folder / PTH, f"import {MODULE}\n")  # last: from here on Python imports the other file
    print(f"Every script that {sys.executable} runs now knows")
    print(f'- "{DEEPSPEED_KEY}" in a DeepSpeed configuration,')
    print('- torch.distributed.init_process_group("ncz").')
    print(f"That is the work of {folder / PTH}.")
    print("Do the same on every machine of a training. `ncz disable` takes it back.")


def disable(options: argparse.Namespace) -> None:
    """Remove the files wherever they are."""
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
    """The .pth files that are there."""
    return [folder / PTH for folder in _folders() if (folder / PTH).exists()]


def _can_be_written(folder: Path) -> bool:
    """Whether files can be written to `folder`, which is made if it is not there: a user's own may not be."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _folders() -> list[Path]:
    """Where this Python looks for .pth files."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(each) for each in (sysconfig.get_path("purelib"), *own)]
