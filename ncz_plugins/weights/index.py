"""The head of a patch and its index, which lists tensors. Both are checked before any tensor is decoded.

A patch is a head, an index and frames. All numbers of the head are little endian:

| offset | size | field | |
|---|---|---|---|
| 0 | 4 | magic | `4E 43 5A 50`, "NCZP" |
| 4 | 4 | format | 2 |
| 8 | 4 | bytes of the index | as they stand in the patch |
| 12 | 4 | CRC-32 of the index | of the same bytes |
| 16 | | index | `Contents` as JSON, compressed by zlib, 64 times at most |

The frames of all tensors follow, in the order of the index. patch.py says what they hold.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.config import first_problem
from ..core.errors import FrameError, MismatchError
from ..kernels.format import CHUNK
from .items import MAX_DIMENSIONS, is_utf8

FRAME_ELEMENTS = 256 * CHUNK  # of every frame of a tensor but its last one

_MAGIC, _FORMAT = 0x505A434E, 2  # "NCZP", little endian
_HEAD = struct.Struct("<IIII")

# Limits that keep a small patch from asking for a lot of memory.
_MAX_INDEX_BYTES_PER_BYTE = 64  # uncompressed per compressed byte
_MAX_ELEMENTS_PER_BYTE = 1024  # of a frame: no coder writes 16,384 elements in fewer than 24 bytes
_MAX_ELEMENT_BYTES = 8
_ALWAYS_REFERRING_BYTES = 1 << 16  # of tensors that refer to others, allowed in every patch

# What a tensor's frames hold, by the tensor's dtype: elements that change as a whole. A complex number is two floats.
# Tensors of any other dtype are coded as int8, byte by byte.
_CODED_AS = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "complex32": "float16",
    "C64": "float32",
    "complex128": "float64",
    "I16": "int16",
    "U16": "int16",
    "I32": "int32",
    "U32": "int32",
    "I64": "int64",
    "U64": "int64",
}
_CODED_DTYPES = {name: getattr(torch, name) for name in ("int8", *_CODED_AS.values())}

_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


# ------------------------------------------------------------------ what an index holds


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Description(NamedTuple):
    """What tells two versions of a tensor apart: its form, and a digest of its bytes, see `Backend.digest`."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    digest: int

    def has_form_of(self, other: Description) -> bool:
        """Whether both have the same dtype, shape and size. Only then can one be coded as changes of the other."""
        return self[:3] == other[:3]


class Entry(_Strict):
    """A row of the index: a tensor of the new version that is new or has changed.

    Attributes:
        dtype: name of the dtype in the safetensors format, or torch's name where that format has none.
        bytes: size of the tensor.
        digest: checksum of the tensor's bytes, see `Backend.digest`.
        kind: how the patch holds the tensor:
            "changes": frames of changes to the base's tensor of this name;
            "whole": frames of the tensor itself;
            "plain": one frame, which is the tensor's bytes, uncoded;
            "equal": no frames; the tensor has the bytes of the tensor `of`, in memory of its own;
            "shared": no frames; the tensor is the tensor `of`, in the same memory.
        coded: dtype of the elements in frames of "changes" and "whole".
        frames: bytes of each frame. 0: no element of this frame has changed.
        of: name of a tensor that is not "equal" or "shared" itself.
    """

    name: str
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=MAX_DIMENSIONS)]
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
        return _CODED_DTYPES[self.coded]


class FileHeader(_Strict):
    """The header of the safetensors file that a patch makes.

    Attributes:
        checksum: CRC-32 of the header's text.
        text: the header's text. None: the same text as in the base.
    """

    checksum: _Word
    text: str | None


class Contents(_Strict):
    """The index of a patch. A tensor that is not listed in it is the same as in the base.

    Attributes:
        base: identity of the version that the patch must be applied to. None: the patch holds a whole version.
        identity: identity of the version that the patch makes, see `identity_of`.
        tensors: the tensors that are new or have changed.
        names: names of all tensors of the new version, in its order. None: the base's names, then new ones.
        file: None for a patch that was made of state dicts.
    """

    base: _Word | None
    identity: _Word
    tensors: list[Entry]
    names: list[str] | None = None
    file: FileHeader | None = None

    def names_after(self, base: Mapping[str, object]) -> list[str]:
        """Names of all tensors of the new version, in its order, if the patch is applied to `base`."""
        if self.names is not None:
            return self.names
        kept = [] if self.base is None else list(base)
        return [*kept, *(entry.name for entry in self.tensors if self.base is None or entry.name not in base)]


def identity_of(described: Mapping[str, Description]) -> int:
    """The identity of a version: 32 bits of the names and descriptions of all its tensors, in any order."""
    return zlib.crc32(json.dumps(sorted((name, *description) for name, description in described.items())).encode())


def coded_as(dtype: str) -> str:
    """The name of the dtype as which frames hold a tensor of `dtype`."""
    return _CODED_AS.get(dtype, "int8")


def may_refer(referring_bytes: int, frame_bytes: int, base_bytes: int) -> bool:
    """Whether a patch may have `referring_bytes` of "equal" and "shared" tensors.

    Without a limit, a few bytes of index could ask for any amount of memory. The limit grows with what the patch takes
    anyway: its frames, and the memory of the base.
    """
    limit = _MAX_ELEMENT_BYTES * _MAX_ELEMENTS_PER_BYTE * frame_bytes + base_bytes + _ALWAYS_REFERRING_BYTES
    return referring_bytes <= limit


# ------------------------------------------------------------------ writing and reading


def write_head(contents: Contents) -> bytes:
    """The head and the index of a patch."""
    text = contents.model_dump_json(exclude_defaults=True).encode()
    index = zlib.compress(text)
    # Readers refuse an index that was compressed further than this. Names of one letter repeated can do that.
    if len(text) > _MAX_INDEX_BYTES_PER_BYTE * len(index):
        index = zlib.compress(text, 0)
    return _HEAD.pack(_MAGIC, _FORMAT, len(index), zlib.crc32(index)) + index


def read_head(patch: memoryview) -> tuple[Contents, int]:
    """The index of a patch, and the offset of its first frame.

    Raises FrameError for a head or an index that is damaged or contradicts itself.
    """
    if len(patch) < _HEAD.size:
        raise FrameError(f"{len(patch)} bytes are too few for a patch")
    magic, version, size, checksum = _HEAD.unpack_from(patch)
    if magic != _MAGIC:
        raise FrameError(f"magic is {magic:#010x}, not {_MAGIC:#010x}: not a patch")
    if version != _FORMAT:
        raise FrameError(f"the patch has format {version}; this build reads format {_FORMAT}")
    index = patch[_HEAD.size : _HEAD.size + size]
    if len(index) != size or zlib.crc32(index) != checksum:
        raise FrameError("the head of the patch is damaged: the checksum of its index is wrong")
    contents = _parse(index)
    if contents.file is not None and not is_utf8(contents.file.text or ""):
        raise FrameError("the index of the patch is invalid: UTF-8 can't write the header of its file")
    _check_names(contents)
    for entry in contents.tensors:
        _check_entry(entry, contents.base is not None)
    return contents, _HEAD.size + size


def _parse(index: memoryview) -> Contents:
    """Uncompress an index and check the type of every field. Raises FrameError."""
    unpacking = zlib.decompressobj()
    try:
        # One byte more than the limit, so that zlib reaches the end of a text that just fits.
        text = unpacking.decompress(index, _MAX_INDEX_BYTES_PER_BYTE * len(index) + 1)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("its compressed text is cut off, or too long")
        return Contents.model_validate(json.loads(text))
    except (ValueError, RecursionError, zlib.error) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise FrameError(f"the index of the patch is invalid: {problem}") from None


# ------------------------------------------------------------------ checks of an index


def _check_names(contents: Contents) -> None:
    """Raise FrameError unless every name is listed once, and all listed tensors are part of the new version."""
    listed = [entry.name for entry in contents.tensors]
    for names in (listed, contents.names or []):
        if len(set(names)) < len(names):
            raise FrameError("a tensor is in the patch twice")
    if contents.names is not None and not set(listed) <= set(contents.names):
        raise FrameError("the index of the patch contradicts itself: it lists tensors that the new version lacks")


def _check_entry(entry: Entry, has_base: bool) -> None:
    """Raise FrameError if one tensor's row of the index contradicts itself, or asks for too much memory."""
    # The name can be printed, and the sizes are possible.
    if not is_utf8(entry.name) or not is_utf8(entry.of or ""):
        raise FrameError(f"{ascii(entry.name)}: UTF-8 can't write the names of this tensor")
    if entry.coded not in _CODED_DTYPES or entry.bytes % entry.coded_dtype.itemsize:
        raise FrameError(f"{entry.name}: {entry.bytes} bytes can't be coded as {ascii(entry.coded)[:80]}")
    # Torch multiplies the sizes of an empty tensor as well, and must not overflow.
    if math.prod(max(1, size) for size in entry.shape) >= 1 << 62:
        raise FrameError(f"{entry.name}: a shape of {len(entry.shape)} sizes up to {max(entry.shape)} is too large")
    # The number of frames fits the tensor, and only "equal" and "shared" refer to another tensor.
    elements = entry.bytes // entry.coded_dtype.itemsize
    if len(entry.frames) != _frame_count(entry, elements) or (entry.kind == "changes" and not has_base):
        raise FrameError(f"{entry.name}: {len(entry.frames)} frames are impossible for {entry.kind} of {entry.shape}")
    if (entry.of is None) == (entry.kind in ("equal", "shared")):
        raise FrameError(f"{entry.name}: a tensor that is held as {entry.kind} can't refer to {entry.of}")
    # The frames can hold the tensor.
    held = sum(entry.frames)
    if entry.kind == "plain" and held != entry.bytes:
        raise FrameError(f"{entry.name}: its frame has {held} bytes, and the tensor {entry.bytes}")
    if entry.kind == "whole" and (elements // _MAX_ELEMENTS_PER_BYTE > held or 0 in entry.frames):
        raise FrameError(f"{entry.name}: {held} bytes can't hold the {elements} elements that the index says")


def _frame_count(entry: Entry, elements: int) -> int:
    """Number of frames of a tensor with `elements` elements."""
    if entry.kind in ("equal", "shared"):
        return 0
    if entry.kind == "plain":
        return 1 if entry.bytes else 0
    return -(-elements // FRAME_ELEMENTS)


# ------------------------------------------------------------------ checks against a base


def require_base(contents: Contents, found: int | None) -> None:
    """Raise MismatchError unless a patch can be applied to a version.

    Args:
        found: identity of that version. None: the receiver has no version.
    """
    if contents.base is None or found == contents.base:
        return
    if found is None:
        raise MismatchError("the patch holds changes, and there is no version to apply them to: ask for a whole one")
    raise MismatchError(
        f"the patch is for version {contents.base:08x}, and this is version {found:08x}: ask for a patch for "
        f"version {found:08x}, or for a whole version. Weights that were changed in place are another version"
    )


def check_version(contents: Contents, base: Mapping[str, Description]) -> None:
    """Raise FrameError unless applying a patch to `base` makes the version that the index says.

    Args:
        base: descriptions of the base's tensors, none if the patch holds a whole version.
    """
    # Every tensor of the new version is known, and together they have the identity that the index says.
    entries = {entry.name: entry for entry in contents.tensors}
    described = {}
    for name in contents.names_after(base):
        if name not in entries and name not in base:
            raise FrameError(f"{ascii(name)}: neither the patch nor its base holds this tensor")
        described[name] = entries[name].description if name in entries else base[name]
    if identity_of(described) != contents.identity:
        raise FrameError("the index of the patch contradicts itself: its tensors don't make the version that it names")
    # A tensor that refers to another one has the same description, and the other one refers to none.
    referring = [entry for entry in contents.tensors if entry.of is not None]
    for entry in referring:
        chained = entry.of in entries and entries[entry.of].of is not None
        if described.get(entry.of) != entry.description or chained:
            raise FrameError(f"{entry.name}: the patch says that it equals {ascii(entry.of)[:80]}, which can't be")
    # Copies take no more memory than the limit.
    referring_bytes = sum(entry.bytes for entry in referring)
    frame_bytes = sum(sum(entry.frames) for entry in contents.tensors)
    if not may_refer(referring_bytes, frame_bytes, sum(each.bytes for each in base.values())):
        raise FrameError(
            f"{referring_bytes} bytes of tensors that equal others are too many for so small a patch ({frame_bytes} "
            "bytes of frames)"
        )
