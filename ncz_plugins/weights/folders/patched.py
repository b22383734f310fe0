"""Makes safetensors files of versions from patches, and patches from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

from ...core.errors import UnsupportedError
from ..apply import read_patches
from ..files import FileBytes, WeightFile, apply_file_patch, make_file_patch, mapped, read_file, with_moved
from .copying import naming, stored_in
from .manifest import PATCH, WEIGHTS, Manifest, open_stored, require
from .versions import Versions


def pieces(versions: Versions, number: int, name: str) -> Iterator[bytes | memoryview]:
    """The bytes of a file that a patch makes."""
    return iter(FileBytes(_Files(versions).file(number, name)))


class PatchMaker:
    """Makes patches of files of the version `older`."""

    def __init__(self, versions: Versions, older: Manifest):
        self._versions, self._older = versions, older
        self._places: dict[str, str] | None = None  # the file of each tensor of `older`

    def patch(self, source: Path) -> tuple[bytes, dict[str, str]]:
        """The changes of a safetensors file, and the tensors that have moved there from another file of `older`."""
        new, number, files = _read(source), self._older.version, _Files(self._versions)
        known = files.file(number, source.name).forms if source.name in self._older.files else {}
        others = new.forms.keys() - known.keys()
        places = self._tensor_places() if others else {}
        moved = {name: places[name] for name in new.forms if name in others and name in places}
        with naming(self._versions.directory(number) / source.name):
            return make_file_patch(new, files.base(number, source.name, moved)), moved

    def _tensor_places(self) -> dict[str, str]:
        if self._places is None:
            names = [name for name in self._older.files if name.endswith(WEIGHTS)]
            files = _Files(self._versions)
            read = {name: files.file(self._older.version, name).forms for name in names}
            self._places = {tensor: name for name, forms in read.items() for tensor in forms}
        return self._places


class _Files:
    """Safetensors files of versions. Their tensors are made when they are asked for."""

    def __init__(self, versions: Versions):
        self._versions = versions
        self._found: dict[tuple[int, str], WeightFile] = {}

    def file(self, number: int, name: str) -> WeightFile:
        """A file of a version. Raises FrameError and MismatchError."""
        if (number, name) not in self._found:
            self._found[number, name] = self._file(number, name)
        return self._found[number, name]

    def base(self, number: int, name: str, moved: Mapping[str, str]) -> WeightFile | None:
        """What a patch of the file `name` changes: that file of version `number`, and tensors of its other files."""
        own = self.file(number, name) if name in self._versions.manifest(number).files else None
        others = {each: self.file(number, each) for each in set(moved.values())}
        return with_moved(own, {tensor: others[each] for tensor, each in moved.items()})

    def _file(self, number: int, name: str) -> WeightFile:
        versions, row = self._versions, self._versions.row(number, name)
        base = versions.manifest(number).base
        if row.stored == "file" or versions.is_held(row):
            return self._copied(number, name)
        if row.stored == "base":
            return self.file(base, name)
        # What is compared is what is parsed: a patch is read, not mapped, so it may change or shrink meanwhile.
        path = versions.directory(number) / (name + PATCH)
        with open_stored(path, row.patch) as file:
            data = file.read(row.patch.bytes)
        require(path, stored_in(BytesIO(data)), row.patch)
        with naming(path):
            patch = read_patches(data)
        return apply_file_patch(patch, self.base(base, name, row.moved))

    def _copied(self, number: int, name: str) -> WeightFile:
        """A file that is held, whose SHA-256 is known, or lies beside the manifest."""
        row, path = self._versions.row(number, name), self._versions.directory(number) / name
        with self._versions.open(number, name) as file:
            if not self._versions.is_held(row):
                require(path, stored_in(file), row)
                file.seek(0)
            with naming(path):
                return read_file(mapped(file))


def _read(path: Path) -> WeightFile:
    """A safetensors file of a checkpoint. Errors name it."""
    with path.open("rb") as file:
        try:
            return read_file(mapped(file))
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from None
