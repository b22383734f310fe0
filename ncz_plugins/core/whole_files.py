"""Files that are written as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Write a file. Whoever reads it finds all of it, or what stood there before. Raises OSError."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder: name a file in it", os.fspath(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("xb") as file:  # never through a link that somebody else has put there
        try:
            file.write(data)
            file.flush()
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
