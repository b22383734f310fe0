"""The head of a patch and its index, which lists parts of tensors. Both are checked before any frame is decoded.

docs/reference/patch-format.md describes all fields and rules.
"""

from __future__ import annotations

import math
import zlib
from functools import cached_property
from typing import Annotated

from pydantic import Field, ValidationError

from ..core.config import first_problem
from ..core.errors import FrameError
from ..kernels.arrays import numpy_dtype
from .boxes import Box, frame_count, frames_of
from .forms import MAX_DIMENSIONS, NARROWER, Form, Held
from .head import FORMAT, FORMAT_WITH_TAG, HEAD, MAGIC, format_of
from .strict import Size, Strict

# Limits that keep a small patch from asking for a lot of memory.
_MAX_INDEX_BYTES_PER_BYTE = 64  # uncompressed per compressed byte
_ALWAYS_INDEX_BYTES = 16 << 20  # uncompressed, allowed in every patch
# Of a frame without a base. Publishers write SPARSE only with one; all other coders take 20 bytes for 16,384 elements.
_MAX_ELEMENTS_PER_BYTE = 1024
_MAX_ELEMENTS = 1 << 62  # torch multiplies sizes in 63 bits

_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Sizes = Annotated[tuple[Size, ...], Field(max_length=MAX_DIMENSIONS + 1)]


class Entry(Strict):
    """A row of the index: a part of a tensor that is new or has changed.

    Attributes:
        dtype, shape, nbytes: see `Form`.
        offsets, sizes: the box that the part covers, see `Form.sizes`. None: the whole tensor.
        from_base: whether frames hold changes from the base. Otherwise they hold changes from zeros.
        narrow: dtype in which frames hold the elements, see NARROWER. None: that of the tensor.
        frames: bytes of each frame. 0: no element of this frame has changed.
        digests: checksum of each frame's elements in the new version, see `Backend.digest`; 0 for a frame of 0 bytes.
        of: name of another tensor of this patch. This part has its bytes and its frames, and they are not repeated.
    """

    name: str
    dtype: str
    shape: _Sizes
    nbytes: Size | None = None
    offsets: _Sizes | None = None
    sizes: _Sizes | None = None
    from_base: bool = False
    narrow: str | None = None
    frames: tuple[Size, ...] = ()
    digests: tuple[_Word, ...] = ()
    of: str | None = None

    @classmethod
    def for_held(cls, name: str, held: Held, **coded) -> Entry:
        """The row of what a rank holds of a tensor; `coded` are the fields that say how."""
        box = {} if held.is_whole else held.box._asdict()
        return cls(name=name, **held.form._asdict(), **box, **coded)

    @cached_property
    def form(self) -> Form:
        return Form(self.dtype, self.shape, self.nbytes)

    @cached_property
    def box(self) -> Box:
        offsets, sizes = Box.whole(self.form.sizes)
        return Box(offsets if self.offsets is None else self.offsets, sizes if self.sizes is None else self.sizes)


class FileHeader(Strict):
    """The header of the safetensors file that a patch makes.

    Attributes:
        checksum: CRC-32 of the header.
        metadata: the file's metadata. With it and the tensors, a reader writes the header as safetensors does.
        text: the header itself, where it is not what safetensors writes.
        Both None: the header of the base.
    """

    checksum: _Word
    metadata: dict[str, str] | None = None
    text: str | None = None


class Contents(Strict):
    """The index of a patch. A tensor that is not listed in it is the same as in the base.

    Attributes:
        base: identity of the version that the patch must be applied to. None: the patch holds a whole version.
        version: identity of the version that the patch makes, see `identity_of` in make.py.
        rank, ranks: a version that `ranks` ranks publish together is all of their patches.
        number: of the version, the same on all of these ranks. None: not known.
        tensors: the parts that are new or have changed.
        gone: names of the base's tensors that the new version lacks.
        file: None for a patch that was made of state dicts.
    """

    base: _Word | None
    version: _Word
    rank: Size = 0
    ranks: Size = 1
    number: Size | None = None
    tensors: tuple[Entry, ...]
    gone: tuple[str, ...] = ()
    file: FileHeader | None = None


# ------------------------------------------------------------------ writing and reading


def write_head(contents: Contents, has_tag: bool = False) -> bytes:
    """The head and the index of a patch. `has_tag`: whether a keyed checksum will follow the frames."""
    text = contents.model_dump_json(exclude_defaults=True).encode()
    index = zlib.compress(text)
    # Readers refuse an index that was compressed further than this. Names of one letter repeated can do that.
    if len(text) > _max_index_bytes(index):
        index = zlib.compress(text, 0)
    return HEAD.pack(MAGIC, FORMAT_WITH_TAG if has_tag else FORMAT, len(index), zlib.crc32(index)) + index


def read_head(patch: memoryview) -> tuple[Contents, int]:
    """The index of a patch, which may lack its keyed checksum, and the offset of its first frame.

    Raises FrameError for a head or an index that is damaged or contradicts itself.
    """
    format_of(patch)
    *_, size, checksum = HEAD.unpack_from(patch)
    index = patch[HEAD.size : HEAD.size + size]
    if len(index) != size or zlib.crc32(index) != checksum:
        raise FrameError("the head of the patch is damaged: the checksum of its index is wrong")
    contents = _parse(index)
    _check(contents)
    return contents, HEAD.size + size


def _max_index_bytes(index: bytes | memoryview) -> int:
    """Most bytes that an index may have when it is uncompressed."""
    return max(_ALWAYS_INDEX_BYTES, _MAX_INDEX_BYTES_PER_BYTE * len(index))


def _parse(index: memoryview) -> Contents:
    """Uncompress an index and check the type of every field. Raises FrameError."""
    unpacking = zlib.decompressobj()
    try:
        # One byte more than the limit, so that zlib reaches the end of a text that just fits.
        text = unpacking.decompress(index, _max_index_bytes(index) + 1)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("its compressed text is cut off, or too long")
        return Contents.model_validate_json(text)
    except (ValueError, RecursionError, zlib.error) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise FrameError(f"the index of the patch is invalid: {problem}") from None


# ------------------------------------------------------------------ checks of an index


def _check(contents: Contents) -> None:
    """Raise FrameError if an index contradicts itself, or asks for more memory than its frames can fill."""
    if contents.rank >= contents.ranks:
        raise FrameError(f"the patch is that of rank {contents.rank} of {contents.ranks}, which can't be")
    entries = {entry.name: entry for entry in contents.tensors}
    if len(entries) < len(contents.tensors) or entries.keys() & set(contents.gone):
        raise FrameError("a tensor is in the patch twice")
    for entry in contents.tensors:
        _check_box(entry)
        if entry.of is None:
            _check_frames(entry, contents.base is not None)
            continue
        # A part that refers to another one has no frames of its own, and the other one refers to none.
        other = entries.get(entry.of)
        fits = other is not None and other.of is None and (other.form, other.box) == (entry.form, entry.box)
        if not fits or entry.frames or entry.digests or entry.from_base:
            raise FrameError(f"{entry.name}: the patch says that it equals {ascii(entry.of)[:80]}, which can't be")


def _check_box(entry: Entry) -> None:
    """Raise FrameError unless the part lies in a tensor that torch can have."""
    if not entry.form.is_consistent:
        raise FrameError(f"{entry.name}: {entry.dtype} with {entry.nbytes} bytes of its own can't be")
    offsets, sizes = entry.box
    shapes = {entry.shape, entry.form.sizes, sizes}
    # Torch multiplies the sizes of an empty tensor as well, and must not overflow.
    if any(math.prod(max(1, size) for size in each) >= _MAX_ELEMENTS for each in shapes):
        raise FrameError(f"{entry.name}: a shape of {len(entry.shape)} sizes up to {max(entry.shape)} is too large")
    inside = len(offsets) == len(sizes) == len(entry.form.sizes)
    if not inside or any(first + size > most for first, size, most in zip(offsets, sizes, entry.form.sizes)):
        raise FrameError(f"{entry.name}: its part does not lie in a tensor of shape {list(entry.shape)[:20]}")


def _check_frames(entry: Entry, has_base: bool) -> None:
    """Raise FrameError unless there are as many frames as the part has, and each can hold its elements."""
    if not len(entry.frames) == len(entry.digests) == frame_count(entry.box.sizes) or (
        entry.from_base and not has_base
    ):
        raise FrameError(f"{entry.name}: {len(entry.frames)} frames are impossible for its part")
    if entry.narrow is not None and entry.narrow not in NARROWER.get(entry.dtype, ()):
        raise FrameError(f"{entry.name}: elements of {entry.dtype} can't be held as {ascii(entry.narrow)[:80]}")
    # Changes take no memory that the base does not take.
    itemsize = numpy_dtype(entry.form.elements(entry.narrow)).itemsize
    for size, box in zip(entry.frames, frames_of(entry.box)):
        too_few = not entry.from_base and size * _MAX_ELEMENTS_PER_BYTE < box.numel
        if too_few or size > box.numel * itemsize:
            raise FrameError(f"{entry.name}: {size} bytes can't hold {box.numel} elements of {entry.dtype}")
