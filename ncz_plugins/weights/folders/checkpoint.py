"""The files of a checkpoint that a publisher or a reader has on its disk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...core.errors import FrameError, MismatchError, UnsupportedError
from .copying import Readers, naming_files
from .manifest import INDEX, MANIFEST, NAME, SUFFIXES, WEIGHTS, read_manifest, require_index


def files_of(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by name. Raises UnsupportedError if it is not complete."""
    try:
        paths = sorted(path for path in checkpoint.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
    except OSError as error:
        raise UnsupportedError(f"{checkpoint}: can't be read: {error.strerror}: name a checkpoint's folder") from None
    sources = {path.name: path for path in paths if path.name != MANIFEST}
    if not any(name.endswith(WEIGHTS) for name in sources):
        raise UnsupportedError(f"{checkpoint}: has no {WEIGHTS} file: write one by save_pretrained(FOLDER)")
    for name, path in sources.items():
        if not re.fullmatch(NAME, name):
            raise UnsupportedError(f"{path}: its name has unusual characters: rename it")
        if name.endswith(INDEX):
            require_index(path, sources)
    return sources


def states_of(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """What tells that a file was changed or replaced: its inode, size and time. Raises OSError."""
    found = {path: path.stat() for path in paths}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in found.items()}


def hashed(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by SHA-256. Raises UnsupportedError."""
    paths = list(files_of(checkpoint).values())
    with naming_files(checkpoint), Readers() as readers:
        return {stored.sha256: path for path, stored in zip(paths, readers.stored(paths))}


def held(checkpoint: Path, key: bytes | None) -> dict[str, Path]:
    """The files of a checkpoint by the SHA-256 that its manifest says; without a manifest, by that of their bytes."""
    try:
        files = read_manifest(checkpoint, key).files
    except (FrameError, MismatchError):
        return hashed(checkpoint)
    paths = {row.sha256: checkpoint / name for name, row in files.items()}
    return {sha256: path for sha256, path in paths.items() if path.is_file()}
