"""Cache folder of this user. Nobody else may write there, because we trust its files and run some of them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

ENVIRONMENT = "NCZ_CACHE"  # path of a folder to use instead of ~/.cache/ncz_plugins
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_folder(name: str) -> Path:
    """Folder `name` of the cache, writable for this user only. Created if missing.

    Raises OSError with the reason why there is no safe folder: another user owns it, can write to it, or could replace
    it.
    """
    cache = _cache()
    for folder in (*reversed(cache.parents), cache, cache / name):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    above, found = cache.stat(), (cache / name).lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{cache / name} is not a folder")
    if found.st_uid != os.getuid():
        raise OSError(f"{cache / name} belongs to another user")
    if found.st_mode & _OTHERS:
        raise OSError(f"others can write to {cache / name}")
    # In a folder with the sticky bit, like /tmp, users can't move other users' files.
    if above.st_mode & _OTHERS and not above.st_mode & stat.S_ISVTX:
        raise OSError(f"others can write to {cache}")
    return cache / name


def _cache() -> Path:
    named = os.environ.get(ENVIRONMENT) or os.path.join("~", ".cache", "ncz_plugins")
    path = os.path.expanduser(os.path.expandvars(named))
    if unknown := re.match(r"~[^/]*", path) or re.search(r"\$(\w+|\{[^}]*\})", path):
        raise OSError(f"{ENVIRONMENT}: {named}: {unknown[0]} is not known here")
    return Path(path)


def read_private(file: Path) -> bytes | None:
    """Contents of a file that only this user can write. None if there is no such file."""
    try:
        with open(file, "rb") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid == os.getuid() and not found.st_mode & _OTHERS:
                return opened.read()
    except OSError:
        pass
    return None


def write_private(file: Path, data: bytes) -> None:
    """Write a file atomically, because other processes may read it at the same time. Raises OSError."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(data)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
