"""Reads all files of versions, and lists versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...core.errors import FrameError, MismatchError
from ..keys import require_key
from .copying import Done, Progress, Readers
from .manifest import MANIFEST, PATCH, Manifest, Stored, numbers_in, open_stored, read_manifest, require
from .versions import Versions


class Listed(NamedTuple):
    """A version in a folder.

    Attributes:
        number: of the version.
        manifest: None if it can't be read.
        stored_bytes: size of the version's own files.
        problem: what is missing or can't be read, and what to do; None: the version is complete.
    """

    number: int
    manifest: Manifest | None
    stored_bytes: int
    problem: str | None


def list_versions(folder: str | os.PathLike, key: bytes | None = None) -> list[Listed]:
    """The versions in a folder, the oldest first. `key`: see `fetch_version`."""
    versions, listed = Versions(Path(folder), {}, key), []
    for number in numbers_in(versions.folder):
        problem = versions.problem(number)
        try:
            manifest = versions.manifest(number)
        except (FrameError, MismatchError):
            listed.append(Listed(number, None, 0, str(problem)))
            continue
        own_bytes = sum((row.patch or row).bytes for row in manifest.own.values())
        listed.append(Listed(number, manifest, own_bytes, problem and str(problem)))
    return listed


def verify_versions(folder: str | os.PathLike, progress: Progress | None = None, key: bytes | None = None) -> list[int]:
    """Read all files of a folder of versions, of one version in it, or of what `fetch_version` made.

    Args:
        progress: see `fetch_version`.
        key: see `fetch_version`. With a key, every manifest must have a keyed checksum.

    Returns the numbers of the versions. Raises FrameError, which names the file and what to do, if one is damaged or
    missing, PatchKeyError if the key is not that of the versions, and MismatchError if a version is removed meanwhile.
    """
    folder = Path(folder)
    require_key(key)
    numbers, found = _files_in(folder, key)
    if not numbers:
        raise MismatchError(f"{folder}: holds no version: publish_version, or `ncz patch make`, adds one")
    done = Done(progress, sum(stored.bytes for stored in found.values()))

    with Readers() as readers:
        held = readers.stored(found, done, lambda path: open_stored(path, found[path]))
        for (path, stored), each in zip(found.items(), held):
            require(path, each, stored)
    return numbers


def _files_in(folder: Path, key: bytes | None) -> tuple[list[int], dict[Path, Stored]]:
    """The versions in a folder, or the one that it is, and all of their files."""
    if not (folder / MANIFEST).exists():
        versions, numbers = Versions(folder, {}, key), numbers_in(folder)
        return numbers, {path: stored for number in numbers for path, stored in versions.needed(number)}
    manifest = read_manifest(folder, key)
    own = {name + PATCH if row.patch else name: row.patch or row for name, row in manifest.own.items()}
    return [manifest.version], {folder / name: stored for name, stored in own.items()}
