"""Makes the checkpoint of a version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...core.errors import FrameError, MismatchError
from ...core.whole_files import new_folder
from ..keys import require_key
from .checkpoint import hashed, held
from .copying import Done, Progress, chunks, naming, naming_files, write
from .manifest import INDEX, Manifest, Row, require, require_index, write_manifest
from .patched import pieces
from .versions import Versions

_FILES_AT_ONCE = 2  # one is made while the disk takes the other


def fetch_version(
    folder: str | os.PathLike,
    into: str | os.PathLike,
    version: int | None = None,
    base: str | os.PathLike | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> int:
    """Make the checkpoint of a version, to the bit. Returns the number of the version.

    `into` appears complete, by a rename. Every file is compared with its SHA-256. Takes memory for the patches of two
    of the checkpoint's files, for up to three tensors of each, and for a few frames for each thread.

    Args:
        folder: where versions are.
        into: the folder to make. Must not be there, or must be empty.
        version: its number. None: the newest that is complete.
        base: a checkpoint that the reader holds, such as `into` of a call before. Its files are used if a version has
            them; others are ignored.
        progress: see `publish_version`.
        key: that of the publisher, if it has one. The manifest in `into` has a keyed checksum then, too.

    Raises PatchKeyError if a version has another key, or one although none is given; FrameError if a file is damaged or
    missing, as `version.hmac` is if a key is given and the version has none; MismatchError if there is no such version
    or it was removed while it was read; and UnsupportedError if `into` can't be written.
    """
    folder, into = Path(os.path.abspath(folder)), Path(os.path.abspath(into))
    require_key(key)
    if version is not None:
        Versions(folder, {}, key).manifest(version)  # is it there? A base may take long to be read
    versions = Versions(folder, {} if base is None else held(Path(base), key), key)
    number = versions.newest() if version is None else version
    try:
        _make(versions, number, into, progress, key)
    except (FrameError, MismatchError):
        # Files of the base may have changed since their SHA-256 was noted.
        if base is None:
            raise
        _make(Versions(folder, hashed(Path(base)), key), number, into, progress, key)
    return number


def _make(versions: Versions, number: int, into: Path, progress: Progress | None, key: bytes | None) -> None:
    """Make the folder `into` of a version."""
    files = versions.manifest(number).files
    problem = versions.problem(number)
    if problem is not None:
        raise problem
    done = Done(progress, sum(row.bytes for row in files.values()))
    with naming_files(into), new_folder(into) as partial, ThreadPoolExecutor(_FILES_AT_ONCE, "ncz-fetch") as pool:
        making = [pool.submit(_make_file, versions, number, name, partial, done) for name in files]
        try:
            for each in making:
                each.result()
        except BaseException:
            done.stop()
            pool.shutdown(cancel_futures=True)
            raise
        rows = {name: Row(bytes=row.bytes, sha256=row.sha256, stored="file") for name, row in files.items()}
        write_manifest(partial, Manifest(format=1, version=number, base=None, files=rows), key)


def _make_file(versions: Versions, number: int, name: str, into: Path, done: Done) -> None:
    """Make a file of a version in the folder `into`."""
    files = versions.manifest(number).files
    path, row = versions.directory(versions.origin(number, name)) / name, files[name]
    with naming(path):
        require(path, write(into / name, _pieces(versions, number, name), done, row.bytes), row)
        if name.endswith(INDEX):
            require_index(into / name, files)


def _pieces(versions: Versions, number: int, name: str) -> Iterator[bytes | memoryview]:
    """The bytes of a file of a version."""
    number = versions.origin(number, name)
    row = versions.row(number, name)
    if row.stored == "patch" and not versions.is_held(row):
        yield from pieces(versions, number, name)
        return
    with versions.open(number, name) as file:
        yield from chunks(file)
