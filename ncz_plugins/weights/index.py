"""The index of a patch: what is in it, checked before anything is decoded. patch.py says how the bytes lie."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.config import first_problem
from ..core.errors import FrameError, MismatchError
from ..kernels.format import CHUNK
from .items import MOST_DIMENSIONS, Item, is_text

FRAME = 256 * CHUNK  # elements
_MOST_TEXT_PER_BYTE = 64  # of a compressed index
_MOST_ELEMENTS_PER_BYTE = 1024  # of frames: 16,384 elements take 24 bytes at the least, see container.py
_SPARE_BYTES = 1 << 16  # that tensors may always take which refer to another one

# What the elements in frames are, by dtype; all others are bytes. Two floats are a complex number.
_CODED_AS = {
    **{"F32": "float32", "C64": "float32", "F16": "float16", "complex32": "float16", "BF16": "bfloat16"},
    **{"F64": "float64", "complex128": "float64"},
    **{"I16": "int16", "U16": "int16", "I32": "int32", "U32": "int32", "I64": "int64", "U64": "int64"},
}
_CODED = {name: getattr(torch, name) for name in ("int8", *_CODED_AS.values())}

_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Description(NamedTuple):
    """What tells versions of a tensor apart."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    digest: int


class Entry(_Strict):
    """A tensor of the new version that is new or has changed.

    Attributes:
        dtype: its name in the format of safetensors; of what that lacks, in torch.
        bytes: of the tensor.
        digest: of these bytes, see `Backend.digest`.
        kind: "changes" are changes of what the base has; "whole" is the tensor itself; "plain" are its bytes, uncoded;
            "equal" has the bytes of another tensor; "shared" has that one's memory.
        coded: what its frames hold: elements of 1, 2, 4 or 8 bytes.
        frames: bytes of each; 0: these elements did not change.
        of: the tensor that it is equal to, which is not "equal" or "shared" itself.
    """

    name: str
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=MOST_DIMENSIONS)]
    bytes: _Size
    digest: _Word
    kind: Literal["changes", "whole", "plain", "equal", "shared"]
    coded: str = "int8"
    frames: list[_Size] = []
    of: str | None = None

    @property
    def description(self) -> Description:
        return Description(self.dtype, tuple(self.shape), self.bytes, self.digest)

    @property
    def coded_dtype(self) -> torch.dtype:
        return _CODED[self.coded]


class FileHeader(_Strict):
    """The header of the file of safetensors that a patch makes, byte by byte.

    Attributes:
        checksum: CRC-32 of its text.
        text: None if it is that of the base.
    """

    checksum: _Word
    text: str | None


class Contents(_Strict):
    """The index of a patch. Tensors that are not in it are as the base has them.

    Attributes:
        base: the identity of the version that the patch is for; None for one that holds everything.
        identity: of the version that it makes, see `identity_of`.
        names: of all tensors of the new version, in their order; None: those of the base, then new ones.
        file: None for versions that are no files.
    """

    base: _Word | None
    identity: _Word
    tensors: list[Entry]
    names: list[str] | None = None
    file: FileHeader | None = None

    def names_after(self, base: Mapping[str, object]) -> list[str]:
        """The names of all tensors of the new version."""
        if self.names is not None:
            return self.names
        older = [] if self.base is None else list(base)
        return [*older, *(entry.name for entry in self.tensors if self.base is None or entry.name not in base)]


def identity_of(described: Mapping[str, Description]) -> int:
    """What tells versions apart: 32 bits of the names and descriptions of all tensors."""
    return zlib.crc32(json.dumps(sorted((name, *description) for name, description in described.items())).encode())


def coded_as(item: Item) -> torch.dtype:
    """What frames of a tensor hold."""
    return _CODED[_CODED_AS.get(item.dtype, "int8")]


def may_refer(copied: int, frames: int, base: int) -> bool:
    """Whether tensors of `copied` bytes may refer to others, in a patch with frames of so many bytes and such a base.

    Else a few bytes could ask for any amount of memory.
    """
    return copied <= 8 * _MOST_ELEMENTS_PER_BYTE * frames + base + _SPARE_BYTES


def to_bytes(contents: Contents) -> bytes:
    """An index as it stands in a patch."""
    text = contents.model_dump_json(exclude_defaults=True).encode()
    packed = zlib.compress(text)
    return packed if len(text) <= _MOST_TEXT_PER_BYTE * len(packed) else zlib.compress(text, 0)


def from_bytes(packed: bytes) -> Contents:
    """The reverse. Raises FrameError for what no index says, before memory is taken for it."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(packed, _MOST_TEXT_PER_BYTE * len(packed) + 1)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("its compressed text is cut off, or too long")
        contents = Contents.model_validate(json.loads(text))
    except (ValueError, RecursionError, zlib.error) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise FrameError(f"the index of the patch can't be: {problem}") from None
    names = [entry.name for entry in contents.tensors]
    for listed in (names, contents.names or []):
        if len(set(listed)) < len(listed):
            raise FrameError("a tensor is in the patch twice")
    if contents.names is not None and not set(names) <= set(contents.names):
        raise FrameError("the index of the patch contradicts itself: it has tensors that its version lacks")
    for entry in contents.tensors:
        _check(entry, contents.base is not None)
    return contents


def check_version(contents: Contents, older: Mapping[str, Description]) -> None:
    """Raise FrameError unless a patch makes the version that it says, of a base that is the one it is for."""
    entries = {entry.name: entry for entry in contents.tensors}
    described = {}
    for name in contents.names_after(older):
        if name not in entries and name not in older:
            raise FrameError(f"{ascii(name)}: the patch does not hold this tensor, and its base does not, either")
        described[name] = entries[name].description if name in entries else older[name]
    if identity_of(described) != contents.identity:
        raise FrameError("the index of the patch contradicts itself: its tensors are not those of its version")
    referring = [entry for entry in contents.tensors if entry.of is not None]
    for entry in referring:
        same = described.get(entry.of) == entry.description and (entry.of not in entries or not entries[entry.of].of)
        if not same:
            raise FrameError(f"{entry.name}: the patch says that this tensor is equal to one that is another")
    copied, held = (sum(each.bytes for each in some) for some in (referring, older.values()))
    if not may_refer(copied, sum(sum(entry.frames) for entry in contents.tensors), held):
        raise FrameError(f"{copied} bytes of tensors that are equal to others are too many for so small a patch")


def require_base(contents: Contents, found: int | None) -> None:
    """Raise MismatchError unless a patch is for the version with the identity `found`; None: there is none."""
    if contents.base is None or found == contents.base:
        return
    if found is None:
        raise MismatchError("the patch holds changes, and there is no version to apply them to; ask for a whole one")
    raise MismatchError(
        f"the patch is for version {contents.base:08x}, and this is version {found:08x}, as it is now; ask for a patch "
        "for that one (if weights were changed in place, their identity has changed, too), or for a whole one"
    )


def _check(entry: Entry, has_base: bool) -> None:
    """Raise FrameError for what no entry says."""
    if not is_text(entry.name) or not is_text(entry.of or ""):
        raise FrameError(f"{ascii(entry.name)}: such a name can't be")
    if entry.coded not in _CODED or entry.bytes % entry.coded_dtype.itemsize:
        raise FrameError(f"{entry.name}: {entry.bytes} bytes coded as {ascii(entry.coded)[:80]} can't be")
    if math.prod(max(1, size) for size in entry.shape) >= 1 << 62:  # torch multiplies sizes of empty tensors, too
        raise FrameError(
            f"{entry.name}: {len(entry.shape)} sizes of a shape, {max(entry.shape)} among them, are too many"
        )
    elements = entry.bytes // entry.coded_dtype.itemsize
    if entry.kind in ("equal", "shared"):
        expected = 0
    else:
        expected = bool(entry.bytes) if entry.kind == "plain" else -(-elements // FRAME)
    if len(entry.frames) != expected or (entry.kind == "changes" and not has_base):
        raise FrameError(f"{entry.name}: {len(entry.frames)} frames are impossible for {entry.kind} of {entry.shape}")
    if (entry.of is None) == (entry.kind in ("equal", "shared")):
        raise FrameError(f"{entry.name}: {entry.kind} of {entry.of} can't be")
    held = sum(entry.frames)
    if entry.kind == "plain" and held != entry.bytes:
        raise FrameError(f"{entry.name}: {held} bytes are not the {entry.bytes} of the tensor")
    if entry.kind == "whole" and (elements // _MOST_ELEMENTS_PER_BYTE > held or 0 in entry.frames):
        raise FrameError(f"{entry.name}: {held} bytes can't hold the {elements} elements that the index says")
