"""Adds a version to a folder, and removes old ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...core.errors import FrameError, MismatchError, PatchKeyError, UnsupportedError
from ...core.whole_files import new_folder
from ..keys import require_key
from .checkpoint import files_of, states_of
from .copying import Done, Progress, Readers, chunks, naming_files, write
from .manifest import MAX_NUMBER, PATCH, WEIGHTS, Manifest, Row, Stored, numbers_in, write_manifest
from .patched import PatchMaker
from .versions import MAX_CHAIN, Versions

_REMOVED = ".ncz-removed-"  # what is left of a version while its files are deleted


def publish_version(
    folder: str | os.PathLike,
    checkpoint: str | os.PathLike,
    base: str | os.PathLike | None = None,
    whole_every: int = 16,
    keep: int | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> int:
    """Add a checkpoint to a folder of versions, as changes from the version before. Returns its number, from 1.

    Takes memory for a few of the checkpoint's files, not for all of it. A publisher that dies leaves no version.

    Args:
        folder: where versions are. Made if it is not there.
        checkpoint: a folder with `model.safetensors`, or with several `.safetensors` and their index. Files named
            `.json`, `.txt`, `.model`, `.jinja` and `.tiktoken` belong to it, too; all others are left out.
        base: the checkpoint that was published before, if its folder is still there. Otherwise it is made again.
        whole_every: a whole version follows after this many at the latest, up to 100, and as soon as the patches
            since the last one take more bytes than it.
        keep: number of versions to keep, besides those that they are made of. None: all. Versions that can't be removed
            stay, and all do while one of them is damaged.
        progress: called with the bytes that are done, and all bytes; in any thread, one call at a time.
        key: 16 bytes or more, which readers have, too. Manifests then have a keyed checksum (HMAC-SHA256), and so all
            of a version does, for places that others can write to.

    Raises UnsupportedError if the checkpoint is not complete, can't be read or changes meanwhile, or if another
    publisher is at work, FrameError if the version before is damaged, and PatchKeyError if it has another key. A
    file that gets shorter while a tensor of it is read ends the process (SIGBUS), as files are mapped into memory.
    """
    require_key(key)
    if not 1 <= whole_every <= MAX_CHAIN or (keep is not None and keep < 1):
        raise ValueError(f"whole_every must be 1 to {MAX_CHAIN}, and keep 1 or more, got {whole_every} and {keep}")
    folder, sources = Path(os.path.abspath(folder)), files_of(Path(checkpoint))
    with naming_files(folder):
        nbytes = sum(path.stat().st_size for path in sources.values())
        number = _begin(folder)
    # Changes are made from the newest version, unless a whole one is due. Readers lack what the publisher holds.
    versions = Versions(folder, {}, key)
    is_whole = _is_whole_due(versions, number, whole_every)
    with naming_files(folder), new_folder(folder / f"{number:08d}") as partial:
        with _unchanged(sources.values()):
            if is_whole:
                older, done = None, Done(progress, nbytes)
                rows = {name: _copy(path, partial, done) for name, path in sources.items()}
            else:
                older, done = versions.manifest(number - 1), Done(progress, 2 * nbytes)
                rows = _changes(list(sources.values()), base, versions, older, partial, done)
        write_manifest(partial, Manifest(format=1, version=number, base=older and older.version, files=rows), key)
    if keep is not None:
        _remove_old(Versions(folder, {}, key), keep)
    return number


def _begin(folder: Path) -> int:
    """The number of the next version in a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    number = max(numbers_in(folder), default=0) + 1
    if number > MAX_NUMBER:
        raise UnsupportedError(f"{folder}: {MAX_NUMBER} is the last number of a version: remove what is no version")
    return number


@contextmanager
def _unchanged(paths: Collection[Path]) -> Iterator[None]:
    """Raise UnsupportedError if a file changes meanwhile: its size and SHA-256 would be of one that never was.

    Also instead of other errors, as a file that is half written reads as one that is damaged or is not there.
    """
    before = states_of(paths)
    try:
        yield
    finally:
        after = states_of(path for path in paths if path.exists())
        for path, state in before.items():
            if after.get(path) != state:
                raise UnsupportedError(f"{path}: was changed while it was published: publish it again")


def _is_whole_due(versions: Versions, number: int, whole_every: int) -> bool:
    """Whether version `number` is to be whole: there is nothing to change, or its chain would be long or large."""
    problem = None if number == 1 else versions.problem(number - 1)
    if isinstance(problem, PatchKeyError):
        raise problem
    if number == 1 or problem is not None:
        return True
    chain = versions.chain(number - 1)
    patch_bytes = sum(row.patch.bytes for manifest in chain for row in manifest.files.values() if row.patch)
    return len(chain) >= whole_every or patch_bytes > sum(row.bytes for row in chain[-1].files.values())


# ------------------------------------------------------------------ the files of a version


def _copy(source: Path, into: Path, done: Done) -> Row:
    """Store a file as it is. Returns its row of the manifest."""
    with source.open("rb") as file:
        return Row(**dict(write(into / source.name, chunks(file), done)), stored="file")


def _changes(
    sources: list[Path], base: str | os.PathLike | None, versions: Versions, older: Manifest, into: Path, done: Done
) -> dict[str, Row]:
    """Store files as changes of the version `older`. Returns their rows of the manifest."""
    before = [] if base is None else list(files_of(Path(base)).values())
    with Readers() as readers:
        hashing_before, hashing = readers.stored(before), readers.stored(sources, done)
        held = {stored.sha256: path for path, stored in zip(before, hashing_before)}
        maker = PatchMaker(versions.holding(held), older)
        return {path.name: _change(path, new, maker, older, into, done) for path, new in zip(sources, hashing)}


def _change(source: Path, new: Stored, maker: PatchMaker, older: Manifest, into: Path, done: Done) -> Row:
    """Store the file with the content `new`, unless `older` has it."""
    before = older.files.get(source.name)
    if before is not None and before.sha256 == new.sha256:
        row = Row(**dict(new), stored="base")
    elif source.name.endswith(WEIGHTS):
        patch, moved = maker.patch(source)
        row = Row(**dict(new), stored="patch", patch=write(into / (source.name + PATCH), [patch]), moved=moved)
    else:
        return _copy(source, into, done)
    done.add(new.bytes)
    return row


# ------------------------------------------------------------------ retention


def _remove_old(versions: Versions, keep: int) -> None:
    """Remove all versions but the newest `keep`, and those that they are made of."""
    numbers = numbers_in(versions.folder)
    try:
        needed = {manifest.version for number in numbers[-keep:] for manifest in versions.chain(number)}
    except (FrameError, MismatchError):
        return  # what a version is made of is unknown if one of them is damaged or gone
    for number in set(numbers) - needed:
        # Readers find the version or they don't, never half of it.
        # One that can't be removed stays for the next publisher: this one has published already.
        left = versions.folder / f"{_REMOVED}{number:08d}"
        with suppress(OSError):
            os.rename(versions.directory(number), left)
            shutil.rmtree(left, ignore_errors=True)
