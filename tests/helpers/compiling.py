"""What a C++ compiler makes of sources, made once: kept in the cache of this user, where other clones find it too."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ncz_plugins.kernels.cache import private_folder

KEPT_SECONDS = 7 * 24 * 3600
# Of a preprocessor's line that says where text stands: the folder, by which clones and copies differ.
_FOLDER_OF_A_LINE = re.compile(rb'^(# \d+ ")[^"\n]*/', re.MULTILINE)


def object_of(compiler: str, file: Path, flags: list[str], places: Sequence[str] = ()) -> Path:
    """The object file that is made of `file`.

    Args:
        places: flags that say where the sources lie. What is made follows from what is found there.

    Raises RuntimeError with the compiler's messages.
    """
    text = run([compiler, *flags, *places, "-E", str(file)])  # with all that it includes
    command = [compiler, *flags, "-c"]
    return made([*command, *places, str(file)], "\0".join(command).encode() + _FOLDER_OF_A_LINE.sub(rb"\1", text), ".o")


def program_of(compiler: str, objects: list[Path], flags: list[str]) -> Path:
    """A program, or with such `flags` a library, of object files that `object_of` made. Errors: see there."""
    command = [compiler, *flags, *map(str, objects)]
    return made(command, "\0".join(command).encode(), "")


def made(command: list[str], contents: bytes, suffix: str) -> Path:
    """What `command -o` makes, unless it was made before from the same `contents`. One process at a time makes it."""
    key = hashlib.sha256(_version(command[0]) + contents).hexdigest()[:24]
    target = kept() / f"{key}{suffix}"
    if target.exists():
        os.utime(target)
        return target
    _forget_old()
    with open(kept() / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = kept() / f"{key}.unfinished"
            run([*command, "-o", str(unfinished)])
            unfinished.rename(target)
    return target


@functools.cache
def kept() -> Path:
    """The folder. Raises OSError if there is none that nobody else can write to."""
    return private_folder("tests")


def _forget_old() -> None:
    for file in kept().iterdir():
        with suppress(FileNotFoundError):  # another process may just have finished or forgotten it
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink()


@functools.cache
def _version(compiler: str) -> bytes:
    return run([compiler, "--version"])


def run(command: list[str]) -> bytes:
    """What a command prints. Raises RuntimeError with its messages."""
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.decode(errors='replace')}")
    return done.stdout
