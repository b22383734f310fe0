"""Folders of versions: each version of a checkpoint is a directory, which any tool can list, sync and fetch.

    FOLDER/00000001/    a whole version: the files of a Hugging Face checkpoint, and version.json
    FOLDER/00000002/    changes: NAME.patch for each safetensors file NAME that has changed, and version.json

`version.json`, the manifest, names the files of the checkpoint with their sizes and SHA-256, and how each one is stored
(docs/reference/patch-format.md). A directory appears complete, by a rename, and never changes. Whatever a reader holds
is found by SHA-256, so any checkpoint may be where it starts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..core.errors import FrameError, MismatchError, NczError, PatchKeyError, UnsupportedError
from ..core.whole_files import new_folder, write_whole
from .apply import read_patches
from .files import FileBytes, WeightFile, apply_file_patch, make_file_patch, mapped, read_file, with_moved
from .keys import require_key
from .manifest import (
    AGAIN,
    INDEX,
    MANIFEST,
    MAX_NUMBER,
    NAME,
    PATCH,
    SUFFIXES,
    TAG,
    WEIGHTS,
    Manifest,
    Row,
    Stored,
    json_of,
    numbers_in,
    open_stored,
    read_manifest,
    require,
    require_index,
    tag_text,
)

_REMOVED = ".ncz-removed-"  # what is left of a version while its files are deleted
_CHUNK_BYTES = 16 << 20  # of files that are copied
_MAX_CHAIN = 100  # versions from a whole one on

Progress = Callable[[int, int], object]
"""Called with bytes that are done, and all bytes."""


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


# ------------------------------------------------------------------ what users call


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
        progress: called with the bytes that are done, and all bytes.
        key: 16 bytes or more, which readers have, too. Manifests then have a keyed checksum (HMAC-SHA256), and so all
            of a version does, for places that others can write to.

    Raises UnsupportedError if the checkpoint is not complete, can't be read or changes meanwhile, or if another
    publisher is at work, FrameError if the version before is damaged, and PatchKeyError if it has another key.
    """
    require_key(key)
    if not 1 <= whole_every <= _MAX_CHAIN or (keep is not None and keep < 1):
        raise ValueError(f"whole_every must be 1 to {_MAX_CHAIN}, and keep 1 or more, got {whole_every} and {keep}")
    folder, sources = Path(os.path.abspath(folder)), _files_of(Path(checkpoint))
    with _naming_files(folder):
        before = _states(sources.values())
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(left, ignore_errors=True)
    # Changes are made from the newest version, unless a whole one is due.
    number = max(numbers_in(folder), default=0) + 1
    if number > MAX_NUMBER:
        raise UnsupportedError(f"{folder}: {MAX_NUMBER} is the last number of a version: remove what is no version")
    reader = _Reader(folder, {} if base is None else _hashed(Path(base)), key)
    is_whole = _is_whole_due(_Reader(folder, {}, key), number, whole_every)  # readers lack what the publisher holds
    older = None if is_whole else reader.manifest(number - 1)
    done = _Done(progress, sum(nbytes for _, nbytes, _ in before.values()) * (1 if older is None else 2))
    with _naming_files(folder), new_folder(folder / f"{number:08d}") as partial:
        publisher = _Publisher(reader, older, partial, done)
        rows = {name: publisher.store(path) for name, path in sources.items()}
        # Sizes and SHA-256 would be those of a checkpoint that never was.
        for path, state in _states(sources.values()).items():
            if state != before[path]:
                raise UnsupportedError(f"{path}: was changed while it was published: publish it again")
        manifest = Manifest(format=1, version=number, base=older and older.version, files=rows)
        text = json_of(manifest)
        if key is not None:
            write_whole(partial / TAG, tag_text(text, key))
        write_whole(partial / MANIFEST, text)
    if keep is not None:
        _remove_old(_Reader(folder, {}, key), keep)
    return number


def fetch_version(
    folder: str | os.PathLike,
    into: str | os.PathLike,
    version: int | None = None,
    base: str | os.PathLike | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> int:
    """Make the checkpoint of a version, to the bit. Returns the number of the version.

    `into` appears complete, by a rename. Every file is compared with its SHA-256. Takes memory for the patches of one
    of the checkpoint's files, and for a few tensors.

    Args:
        folder: where versions are.
        into: the folder to make. Must not be there, or must be empty.
        version: its number. None: the newest that is complete.
        base: a checkpoint that the reader holds, such as `into` of a call before. Its files are used if a version has
            them; others are ignored.
        progress: see `publish_version`.
        key: that of the publisher, if it has one.

    Raises PatchKeyError if a version has another key, or one although none is given; FrameError if a file is damaged or
    missing, as `version.hmac` is if a key is given and the version has none; MismatchError if there is no such version
    or it was removed while it was read; and UnsupportedError if `into` can't be written.
    """
    folder, into = Path(os.path.abspath(folder)), Path(os.path.abspath(into))
    require_key(key)
    if version is not None:
        _Reader(folder, {}, key).manifest(version)  # is it there? A base may take long to be read
    reader = _Reader(folder, {} if base is None else _held(Path(base)), key)
    number = reader.newest() if version is None else version
    try:
        _make(reader, number, into, progress)
    except (FrameError, MismatchError):
        # Files of the base may have changed since their SHA-256 was noted.
        if base is None:
            raise
        _make(_Reader(folder, _hashed(Path(base)), key), number, into, progress)
    return number


def verify_versions(folder: str | os.PathLike, progress: Progress | None = None, key: bytes | None = None) -> list[int]:
    """Read all files of a folder of versions, of one version in it, or of what `fetch_version` made.

    Args:
        progress, key: see `fetch_version`. What it made has no key.

    Returns the numbers of the versions. Raises FrameError, which names the file and what to do, if one is damaged or
    missing, and MismatchError if a version is removed meanwhile.
    """
    folder = Path(folder)
    require_key(key)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder, key if os.path.lexists(folder / TAG) else None)
        own = {name + PATCH if row.patch else name: row.patch or row for name, row in manifest.own.items()}
        numbers, found = [manifest.version], {folder / name: stored for name, stored in own.items()}
    else:
        reader, numbers = _Reader(folder, {}, key), numbers_in(folder)
        found = {path: stored for number in numbers for path, stored in reader.needed(number)}
    if not numbers:
        raise MismatchError(f"{folder}: holds no version: publish_version, or `ncz patch make`, adds one")
    done = _Done(progress, sum(stored.bytes for stored in found.values()))
    for path, stored in found.items():
        with open_stored(path, stored) as file:
            require(path, _stored(_chunks(file), done), stored)
    return numbers


def list_versions(folder: str | os.PathLike, key: bytes | None = None) -> list[Listed]:
    """The versions in a folder, the oldest first. `key`: see `fetch_version`."""
    reader, listed = _Reader(Path(folder), {}, key), []
    for number in numbers_in(reader.folder):
        problem = reader.problem(number)
        try:
            manifest = reader.manifest(number)
        except (FrameError, MismatchError):
            listed.append(Listed(number, None, 0, str(problem)))
            continue
        own_bytes = sum((row.patch or row).bytes for row in manifest.own.values())
        listed.append(Listed(number, manifest, own_bytes, problem and str(problem)))
    return listed


# ------------------------------------------------------------------ publishing


class _Publisher:
    """Stores the files of one version in the folder `into`, as changes from the version `older` if there is one."""

    def __init__(self, reader: _Reader, older: Manifest | None, into: Path, done: _Done):
        self._reader, self._older, self._into, self._done = reader, older, into, done
        self._places: dict[str, str] | None = None  # the file of each tensor of `older`

    def store(self, source: Path) -> Row:
        """Store a file of the checkpoint. Returns its row of the manifest."""
        if self._older is None:
            return self._copy(source)
        with source.open("rb") as file:
            new = _stored(_chunks(file), self._done)
        before = self._older.files.get(source.name)
        if before is not None and before.sha256 == new.sha256:
            row = Row(**dict(new), stored="base")
        elif source.name.endswith(WEIGHTS):
            row = Row(**dict(new), stored="patch", **self._patch(source))
        else:
            return self._copy(source)
        self._done.add(new.bytes)
        return row

    def _copy(self, source: Path) -> Row:
        with source.open("rb") as file:
            return Row(**dict(_write(self._into / source.name, _chunks(file), self._done)), stored="file")

    def _patch(self, source: Path) -> dict:
        """Write the changes of a safetensors file."""
        new = _read_weights(source)
        own = self._older.files.keys() & {source.name}
        known = self._reader.file(self._older.version, source.name).forms if own else {}
        # Tensors may have moved here from another file.
        moved = {}
        if new.forms.keys() - known.keys():
            places = self._tensor_places()
            moved = {name: places[name] for name in new.forms if name not in known and name in places}
        with _naming(self._reader.directory(self._older.version) / source.name):
            patch = make_file_patch(new, self._reader.base(self._older.version, source.name, moved))
        self._reader.forget()
        return {"patch": _write(self._into / (source.name + PATCH), [patch], _Done(None, 0)), "moved": moved}

    def _tensor_places(self) -> dict[str, str]:
        if self._places is None:
            files = [name for name in self._older.files if name.endswith(WEIGHTS)]
            read = {name: self._reader.file(self._older.version, name).forms for name in files}
            self._places = {tensor: name for name, forms in read.items() for tensor in forms}
        return self._places


def _files_of(checkpoint: Path) -> dict[str, Path]:
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


def _states(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """What tells that a file was changed or replaced: its inode, size and time. Raises OSError."""
    found = {path: path.stat() for path in paths}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in found.items()}


def _is_whole_due(reader: _Reader, number: int, whole_every: int) -> bool:
    """Whether version `number` is to be whole: there is nothing to change, or its chain would be long or large."""
    problem = None if number == 1 else reader.problem(number - 1)
    if isinstance(problem, PatchKeyError):
        raise problem
    if number == 1 or problem is not None:
        return True
    chain = reader.chain(number - 1)
    patch_bytes = sum(row.patch.bytes for manifest in chain for row in manifest.files.values() if row.patch)
    return len(chain) >= whole_every or patch_bytes > sum(row.bytes for row in chain[-1].files.values())


def _remove_old(reader: _Reader, keep: int) -> None:
    """Remove all versions but the newest `keep`, and those that they are made of."""
    numbers = numbers_in(reader.folder)
    try:
        needed = {manifest.version for number in numbers[-keep:] for manifest in reader.chain(number)}
    except (FrameError, MismatchError):
        return  # what a version is made of is unknown if one of them is damaged or gone
    for number in set(numbers) - needed:
        # Readers find the version or they don't, never half of it.
        # One that can't be removed stays for the next publisher: this one has published already.
        left = reader.folder / f"{_REMOVED}{number:08d}"
        with suppress(OSError):
            os.rename(reader.directory(number), left)
            shutil.rmtree(left, ignore_errors=True)


# ------------------------------------------------------------------ reading


class _Reader:
    """Files of the versions in a folder.

    Args:
        held: files that the reader holds, by SHA-256. They are read in place of those of versions.
        key: of all manifests.
    """

    def __init__(self, folder: Path, held: Mapping[str, Path], key: bytes | None):
        self.folder = folder
        self._held, self._key = held, key
        self._manifests: dict[int, Manifest] = {}
        self._files: dict[tuple[int, str], WeightFile] = {}

    def directory(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def manifest(self, number: int) -> Manifest:
        """Raises FrameError if it is damaged, and MismatchError if there is no such version."""
        if number not in self._manifests:
            if not self.directory(number).is_dir():
                numbers = numbers_in(self.folder) or ["none"]
                raise MismatchError(
                    f"{self.folder}: version {number} is not there, or was removed; versions are {numbers[0]} to "
                    f"{numbers[-1]}: fetch the newest"
                )
            manifest = read_manifest(self.directory(number), self._key)
            if manifest.version != number:
                raise FrameError(f"{self.directory(number)}: its {MANIFEST} is of version {manifest.version}: {AGAIN}")
            self._manifests[number] = manifest
        return self._manifests[number]

    def chain(self, number: int | None) -> list[Manifest]:
        """The manifests of a version, of its base, and so on to a whole version."""
        chain = []
        while number is not None:
            chain.append(self.manifest(number))
            if len(chain) > _MAX_CHAIN:
                raise FrameError(f"{self.folder}: version {number} is more than {_MAX_CHAIN} versions from a whole one")
            number = chain[-1].base
        return chain

    def needed(self, number: int) -> Iterator[tuple[Path, Stored]]:
        """The files of all versions that a version is made of, but for those that are held."""
        todo, seen, numbers = [(number, name) for name in self.manifest(number).files], set(), set()
        while todo:
            at, name = todo.pop()
            row = self._row(at, name)
            if (at, name) in seen or row.sha256 in self._held:
                continue
            seen.add((at, name))
            numbers.add(at)
            if len(numbers) > _MAX_CHAIN:
                raise FrameError(f"{self.folder}: version {number} is made of more than {_MAX_CHAIN} versions")
            base = self.manifest(at).base
            if row.stored == "file":
                yield self.directory(at) / name, row
            elif row.stored == "base":
                todo.append((base, name))
            else:
                yield self.directory(at) / (name + PATCH), row.patch
                own = self.manifest(base).files.keys() & {name}
                todo += [(base, each) for each in own | set(row.moved.values())]

    def problem(self, number: int) -> NczError | None:
        """Why a version can't be read, as far as the names and sizes of its files tell. None: it is complete."""
        try:
            for path, stored in self.needed(number):
                open_stored(path, stored).close()
        except (FrameError, MismatchError) as error:
            return error
        return None

    def newest(self) -> int:
        """The newest complete version. Files of a newer one may be on their way."""
        problems = []
        for number in reversed(numbers_in(self.folder)):
            problem = self.problem(number)
            if problem is None:
                return number
            if isinstance(problem, PatchKeyError):
                raise problem
            problems.append(problem)
        if problems:
            raise problems[0]
        raise MismatchError(f"{self.folder}: holds no version yet: wait until one is published")

    def origin(self, number: int, name: str) -> int:
        """The version whose directory holds a file or its patch: `number`, or what it is made of."""
        while (row := self._row(number, name)).stored == "base" and row.sha256 not in self._held:
            number = self.manifest(number).base
        return number

    def pieces(self, number: int, name: str) -> Iterator[bytes | memoryview]:
        """The bytes of a file of a version."""
        number = self.origin(number, name)
        row = self._row(number, name)
        if row.stored == "patch" and row.sha256 not in self._held:
            yield from FileBytes(self.file(number, name))
            self.forget()
        else:
            with self._open(number, name) as file:
                yield from _chunks(file)

    def file(self, number: int, name: str) -> WeightFile:
        """A safetensors file of a version. Its tensors are made when they are asked for. Kept until `forget`."""
        if (number, name) not in self._files:
            self._files[number, name] = self._file(number, name)
        return self._files[number, name]

    def forget(self) -> None:
        """Close all safetensors files."""
        self._files.clear()

    def _file(self, number: int, name: str) -> WeightFile:
        row, path = self._row(number, name), self.directory(number) / name
        is_held = row.sha256 in self._held
        if row.stored == "file" or is_held:
            with self._open(number, name) as file:
                if not is_held:
                    require(path, _stored(_chunks(file), _Done(None, 0)), row)
                    file.seek(0)
                with _naming(path):
                    return read_file(mapped(file))
        base = self.manifest(number).base
        if row.stored == "base":
            return self.file(base, name)
        # What is compared is what is parsed: a patch is read, not mapped, so it may change or shrink meanwhile.
        path = path.with_name(name + PATCH)
        with open_stored(path, row.patch) as file:
            data = file.read(row.patch.bytes)
        require(path, _stored([data], _Done(None, 0)), row.patch)
        with _naming(path):
            patch = read_patches(data)
        return apply_file_patch(patch, self.base(base, name, row.moved))

    def base(self, number: int, name: str, moved: Mapping[str, str]) -> WeightFile | None:
        """What a patch of the file `name` changes: that file of version `number`, and tensors of its other files."""
        own = self.file(number, name) if name in self.manifest(number).files else None
        others = {each: self.file(number, each) for each in set(moved.values())}
        return with_moved(own, {tensor: others[each] for tensor, each in moved.items()})

    def _open(self, number: int, name: str) -> BinaryIO:
        """A file that is held, or lies beside the manifest."""
        row = self._row(number, name)
        path = self._held.get(row.sha256)
        return open_stored(self.directory(number) / name, row) if path is None else path.open("rb")

    def _row(self, number: int, name: str) -> Row:
        try:
            return self.manifest(number).files[name]
        except KeyError:
            raise FrameError(f"{self.directory(number)}: has no {name}, which newer versions need: {AGAIN}") from None


def _make(reader: _Reader, number: int, into: Path, progress: Progress | None) -> None:
    """Make the folder `into` of a version."""
    files = reader.manifest(number).files
    problem = reader.problem(number)
    if problem is not None:
        raise problem
    done = _Done(progress, sum(row.bytes for row in files.values()))
    with _naming_files(into), new_folder(into) as partial:
        for name, row in files.items():
            path = reader.directory(reader.origin(number, name)) / name
            with _naming(path):
                require(path, _write(partial / name, reader.pieces(number, name), done, row.bytes), row)
                if name.endswith(INDEX):
                    require_index(partial / name, files)
        rows = {name: Row(bytes=row.bytes, sha256=row.sha256, stored="file") for name, row in files.items()}
        manifest = Manifest(format=1, version=number, base=None, files=rows)
        write_whole(partial / MANIFEST, json_of(manifest))


def _held(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by the SHA-256 that its manifest says; without a manifest, by that of their bytes."""
    try:
        files = read_manifest(checkpoint).files
    except (FrameError, MismatchError):
        return _hashed(checkpoint)
    paths = {row.sha256: checkpoint / name for name, row in files.items()}
    return {sha256: path for sha256, path in paths.items() if path.is_file()}


def _hashed(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint by SHA-256."""
    held = {}
    for path in _files_of(checkpoint).values():
        with _naming_files(path), path.open("rb") as file:
            held[hashlib.file_digest(file, "sha256").hexdigest()] = path
    return held


# ------------------------------------------------------------------ files and manifests


def _read_weights(path: Path) -> WeightFile:
    """A safetensors file of a checkpoint. Errors name it."""
    with path.open("rb") as file:
        try:
            return read_file(mapped(file))
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from None


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_CHUNK_BYTES), b"")


def _write(path: Path, pieces: Iterable[bytes], done: _Done, max_bytes: int | None = None) -> Stored:
    """Write a file. Returns what it holds."""
    hashed = _Hashed(pieces, done, max_bytes)
    write_whole(path, hashed)
    return hashed.stored


def _stored(pieces: Iterable[bytes], done: _Done) -> Stored:
    """What a file holds."""
    hashed = _Hashed(pieces, done)
    for _ in hashed:
        pass
    return hashed.stored


class _Done:
    """Bytes that are done, of all bytes."""

    def __init__(self, progress: Progress | None, all_bytes: int):
        self._progress, self._bytes, self._all_bytes = progress, 0, all_bytes

    def add(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._progress is not None:
            self._progress(self._bytes, self._all_bytes)


class _Hashed:
    """Pieces of a file, which a thread hashes while they are used.

    Attributes:
        stored: size and SHA-256 of all pieces, once they have been used.
    """

    def __init__(self, pieces: Iterable[bytes], done: _Done, max_bytes: int | None = None):
        self.stored: Stored | None = None
        self._pieces, self._done, self._max_bytes = pieces, done, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        digest, nbytes = hashlib.sha256(), 0
        with ThreadPoolExecutor(1) as thread:
            for piece in self._pieces:
                nbytes += len(piece)
                if self._max_bytes is not None and nbytes > self._max_bytes:
                    raise FrameError(f"has more than the {self._max_bytes} bytes that the manifest says: {AGAIN}")
                hashing = thread.submit(digest.update, piece)
                yield piece
                hashing.result()
                self._done.add(len(piece))
        self.stored = Stored(bytes=nbytes, sha256=digest.hexdigest())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put a file of a version in front of errors in making it, unless they name a file of the folder already."""
    try:
        yield
    except (FrameError, MismatchError, UnsupportedError) as error:
        kind = FrameError if isinstance(error, UnsupportedError) else type(error)
        is_named = str(error).startswith(f"{path.parent.parent}{os.sep}")
        raise kind(str(error) if is_named else f"{path}: {error}") from error


@contextmanager
def _naming_files(place: Path) -> Iterator[None]:
    """Turn OSError into an error that names the file; `place` if it names none, as that of a full disk."""
    try:
        yield
    except BlockingIOError as error:
        raise UnsupportedError(f"{error.filename}: another process makes it: wait until it has ended") from None
    except OSError as error:
        raise UnsupportedError(f"{error.filename or place}: {error.strerror or error}") from None
