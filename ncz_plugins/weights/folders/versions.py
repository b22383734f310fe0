"""The versions in a folder: their manifests, and the files that each one is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ...core.errors import FrameError, MismatchError, NczError, PatchKeyError
from .manifest import AGAIN, MANIFEST, PATCH, Manifest, Row, Stored, numbers_in, open_stored, read_manifest

MAX_CHAIN = 100  # versions from a whole one on


class Versions:
    """The versions in a folder.

    Args:
        held: files that the reader holds, by SHA-256. They are read in place of those of versions.
        key: of all manifests.
    """

    def __init__(self, folder: Path, held: Mapping[str, Path], key: bytes | None):
        self.folder = folder
        self._held, self._key = held, key
        self._manifests: dict[int, Manifest] = {}

    def holding(self, held: Mapping[str, Path]) -> Versions:
        """The same folder, for a reader that holds these files."""
        return Versions(self.folder, held, self._key)

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
            if len(chain) > MAX_CHAIN:
                raise FrameError(f"{self.folder}: version {number} is more than {MAX_CHAIN} versions from a whole one")
            number = chain[-1].base
        return chain

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

    def problem(self, number: int) -> NczError | None:
        """Why a version can't be read, as far as the names and sizes of its files tell. None: it is complete."""
        try:
            for path, stored in self.needed(number):
                open_stored(path, stored).close()
        except (FrameError, MismatchError) as error:
            return error
        return None

    def needed(self, number: int) -> Iterator[tuple[Path, Stored]]:
        """The files of all versions that a version is made of, but for those that are held."""
        todo, seen, numbers = [(number, name) for name in self.manifest(number).files], set(), set()
        while todo:
            at, name = todo.pop()
            row = self.row(at, name)
            if (at, name) in seen or self.is_held(row):
                continue
            seen.add((at, name))
            numbers.add(at)
            if len(numbers) > MAX_CHAIN:
                raise FrameError(f"{self.folder}: version {number} is made of more than {MAX_CHAIN} versions")
            base = self.manifest(at).base
            if row.stored == "file":
                yield self.directory(at) / name, row
            elif row.stored == "base":
                todo.append((base, name))
            else:
                yield self.directory(at) / (name + PATCH), row.patch
                own = self.manifest(base).files.keys() & {name}
                todo += [(base, each) for each in own | set(row.moved.values())]

    def row(self, number: int, name: str) -> Row:
        """What a manifest says of a file. Raises FrameError if it does not name the file."""
        try:
            return self.manifest(number).files[name]
        except KeyError:
            raise FrameError(f"{self.directory(number)}: has no {name}, which newer versions need: {AGAIN}") from None

    def origin(self, number: int, name: str) -> int:
        """The version whose directory holds a file or its patch: `number`, or what it is made of."""
        while (row := self.row(number, name)).stored == "base" and not self.is_held(row):
            number = self.manifest(number).base
        return number

    def is_held(self, row: Row) -> bool:
        """Whether the reader holds this file."""
        return row.sha256 in self._held

    def open(self, number: int, name: str) -> BinaryIO:
        """A file that is held, or lies beside the manifest of version `number`."""
        row = self.row(number, name)
        path = self._held.get(row.sha256)
        return open_stored(self.directory(number) / name, row) if path is None else path.open("rb")
