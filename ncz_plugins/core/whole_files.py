"""Files that are written as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Write a file. Whoever reads it finds all of it, or what stood there before. Raises OSError."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("xb") as file:  # never through a link that somebody else has put there
        try:
            file.write(data)
            file.flush()
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
