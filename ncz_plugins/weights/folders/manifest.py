"""Manifests of versions in folders, and the files that they name: read with care, as they may come from anywhere.

docs/reference/patch-format.md describes all fields and rules.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, ValidationError

from ...core.config import first_problem
from ...core.errors import FrameError, MismatchError, PatchKeyError, UnsupportedError
from ...core.whole_files import write_whole
from ..keys import tag_of
from ..strict import Size, Strict

MANIFEST, TAG = "version.json", "version.hmac"
WEIGHTS, INDEX, PATCH = ".safetensors", ".safetensors.index.json", ".patch"
SUFFIXES = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")  # of files that belong to a checkpoint
_NUMBER = re.compile(r"[0-9]{8}")
MAX_NUMBER = 10**8 - 1  # of a version
AGAIN = "copy the folder again, or publish a whole version (whole_every=1)"  # the remedy of damage
_MAX_TAG_BYTES = 128
_MAX_JSON_BYTES = 64 << 20  # of a manifest or an index

# A name in the directory itself: no separator, no `..`, nothing hidden, nothing that a shell reads as an option.
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,199}"
_Name = Annotated[str, Field(pattern=f"^{NAME}$")]
_Number = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class Stored(Strict):
    """Size and content of a file."""

    bytes: Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Row(Stored):
    """What a manifest says of one file of the checkpoint.

    Attributes:
        stored: `file`: beside the manifest. `base`: as in the base. `patch`: as changes from the base.
        patch: the patch, beside the manifest.
        moved: tensors that the patch takes from another file of the base: name of the tensor to name of the file.
    """

    stored: Literal["file", "base", "patch"]
    patch: Stored | None = None
    moved: dict[str, _Name] = {}


class Manifest(Strict):
    """A version. `base` is the number of the version that it changes; None: it is whole."""

    format: Literal[1]
    version: _Number
    base: _Number | None
    files: dict[_Name, Row]

    @property
    def own(self) -> dict[str, Row]:
        """The files that lie beside the manifest, themselves or as a patch."""
        return {name: row for name, row in self.files.items() if row.stored != "base"}


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the versions in a folder, sorted."""
    try:
        found = [each for each in folder.iterdir() if _NUMBER.fullmatch(each.name) and each.is_dir()]
        return sorted(int(each.name) for each in found)
    except OSError as error:
        raise UnsupportedError(f"{folder}: can't be read: {error.strerror}: name a folder of versions") from None


def read_manifest(directory: Path, key: bytes | None = None) -> Manifest:
    """Raises FrameError if the manifest of a version is missing or damaged, PatchKeyError if its key is another one."""
    path = directory / MANIFEST
    with open_stored(path) as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    _require_tag(directory / TAG, text, key)
    try:
        if len(text) > _MAX_JSON_BYTES:
            raise ValueError(f"it has more than {_MAX_JSON_BYTES} bytes")
        manifest = Manifest.model_validate_json(text)
        for name, row in manifest.files.items():
            if not name.endswith(SUFFIXES) or name == MANIFEST:
                raise ValueError(f"{name}: is no file of a checkpoint ({', '.join(SUFFIXES)})")
            needs_base = row.stored != "file"
            if (row.patch is None) != (row.stored != "patch") or (needs_base and manifest.base is None):
                raise ValueError(f"{name}: contradicts itself")
        if manifest.base is not None and manifest.base >= manifest.version:
            raise ValueError(f"version {manifest.version} can't be made of version {manifest.base}")
    except (ValueError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise FrameError(f"{path}: is damaged or of another format: {problem}: {AGAIN}") from None
    return manifest


def _require_tag(path: Path, text: bytes, key: bytes | None) -> None:
    """Compare the keyed checksum of a manifest. A key, or a checksum, on one side only is an error, too."""
    if key is None:
        if os.path.lexists(path):
            raise PatchKeyError(f"{path}: is a keyed checksum, and no key was given: pass the publisher's key")
        return
    if not os.path.lexists(path) and path.parent.exists():
        raise FrameError(
            f"{path}: is missing, and a key was given: copy the folder again, publish with the key, or pass no key if "
            "nobody else can write there"
        )
    with open_stored(path) as file:
        found = file.read(_MAX_TAG_BYTES)
    if not hmac.compare_digest(found.strip(), _tag_text(text, key)):
        raise PatchKeyError(
            f"{path}: is not the keyed checksum of this key: the version was changed on its way, or published with "
            "another key: get it again, or pass the publisher's key"
        )


def _tag_text(text: bytes, key: bytes) -> bytes:
    """The keyed checksum of a manifest, as `version.hmac` holds it."""
    return tag_of([text], key).hex().encode()


def write_manifest(directory: Path, manifest: Manifest, key: bytes | None) -> None:
    """Write the manifest of a version, after its keyed checksum if there is a key. Raises OSError."""
    text = manifest.model_dump_json(exclude_defaults=True, indent=1).encode() + b"\n"
    if key is not None:
        write_whole(directory / TAG, _tag_text(text, key))
    write_whole(directory / MANIFEST, text)


def require_index(path: Path, files: Iterable[str]) -> None:
    """Raise UnsupportedError if an index names files that the checkpoint lacks, such as files outside of its folder."""
    try:
        with path.open("rb") as file:
            named = set(json.loads(file.read(_MAX_JSON_BYTES))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedError(f"{path}: is no index of {WEIGHTS} files: save the checkpoint again") from None
    if missing := sorted(map(ascii, named - set(files))):
        raise UnsupportedError(f"{path}: names {missing[0]}, which the checkpoint lacks: save the checkpoint again")


def open_stored(path: Path, stored: Stored | None = None) -> BinaryIO:
    """Open a file of a version, through no symbolic link. Raises FrameError if it is missing or has another size."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = open(path, "rb", opener=lambda *_: os.open(path.name, flags, dir_fd=directory))
        finally:
            os.close(directory)
    except OSError as error:
        if not path.parent.exists():
            raise MismatchError(f"{path.parent}: was removed while it was read: fetch the newest version") from None
        raise FrameError(f"{path}: can't be read: {error.strerror}: {AGAIN}") from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or (stored is not None and found.st_size != stored.bytes):
        file.close()
        expected = "must be a regular file" if stored is None else f"must be a file of {stored.bytes} bytes"
        raise FrameError(f"{path}: {expected}, and has {found.st_size}: {AGAIN}")
    return file


def require(path: Path, found: Stored, expected: Stored) -> None:
    """Raise FrameError unless a file holds what it should."""
    if (found.bytes, found.sha256) != (expected.bytes, expected.sha256):
        raise FrameError(f"{path}: has another SHA-256 than the manifest says: {AGAIN}")
