"""Safetensors files, read and written byte by byte, and patches between them.

A file is 8 bytes, the size of the header; the header, which is JSON; and the bytes of all tensors, without gaps. Bytes
are never converted to tensors of torch, so files may have dtypes that torch lacks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..core.errors import FrameError, MismatchError, UnsupportedError
from .apply import assemble, read_patches, require_base
from .boxes import Box
from .index import FileHeader
from .make import digest_of, make_patch_of
from .tensors import SAFETENSORS_BITS, TORCH_ONLY, Form, Held

_METADATA = "__metadata__"  # key of a header that is not a tensor
_SIZE_BYTES = 8  # of the header's size
_ALIGNMENT_BYTES = 8  # of the first tensor, in files that get a new header; of every tensor in memory

# Equal tensors travel once. So that a small patch can't make a file of any size, files may have this many bytes of
# tensors that equal others, besides the bytes of the others.
_MAX_EQUAL_SHARE = 64
_ALWAYS_EQUAL_BYTES = 1 << 16


class WeightFile(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        header: text of the header.
        tensors: tensors by name, in the order of their bytes.
    """

    header: str
    tensors: dict[str, Held]


class _Place(NamedTuple):
    """What a header says of one tensor. `begin` and `end` are bytes, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# ------------------------------------------------------------------ files


def read_file(data: bytes) -> WeightFile:
    """Read a file's bytes. Raises UnsupportedError, saying what is wrong, if this is not a safetensors file.

    The message begins with a verb: put the file's name in front of it.
    """
    # The size of the header, and the header.
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    if not 2 <= size <= len(data) - _SIZE_BYTES:
        raise UnsupportedError(
            f"is cut off, or not a safetensors file: of {len(data)} bytes, its header would take {size}"
        )
    header, places = _parse_header(data[_SIZE_BYTES : _SIZE_BYTES + size])
    # Tensors follow, up to the end of the file.
    rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)[_SIZE_BYTES + size :]
    end = places[-1].end if places else 0
    if end != len(rest):
        raise UnsupportedError(f"is damaged: its tensors take {end} bytes, and {len(rest)} follow its header")
    return WeightFile(header, {each.name: _held(each, rest[each.begin : each.end]) for each in places})


def file_of(version: WeightFile) -> bytes:
    """The bytes of a file. Raises FrameError if the header does not describe the tensors."""
    header = version.header.encode()
    try:
        _, places = _parse_header(header)
    except UnsupportedError as error:
        raise FrameError(f"the file that the patch makes {error}") from None
    described = {each.name: Form.of(each.dtype, each.shape, each.end - each.begin) for each in places}
    if described != {name: held.form for name, held in version.tensors.items()}:
        raise FrameError("the header of the file that the patch makes does not describe its tensors")
    size = len(header).to_bytes(_SIZE_BYTES, "little")
    return b"".join([size, header, *(_bytes_of(version.tensors[each.name]) for each in places)])


def _held(place: _Place, data: Tensor) -> Held:
    """A tensor of a file."""
    form = Form.of(place.dtype, place.shape, len(data))
    return _new_held(form, _aligned(data))


def _new_held(form: Form, data: Tensor | None = None) -> Held:
    """A tensor of a form in `data`, uint8; None: in new memory, not filled."""
    if data is None:
        data = torch.empty(form.total_bytes, dtype=torch.uint8, device="cpu")
    return Held(form, Box.whole(form.sizes), data.view(form.coded).view(form.sizes))


def _bytes_of(held: Held) -> memoryview:
    return memoryview(held.data.reshape(-1).view(torch.uint8).numpy())


# ------------------------------------------------------------------ patches of files


def make_file_patch(new: WeightFile, base: WeightFile | None = None) -> bytes:
    """Make the patch that turns the file `base` into `new`, byte by byte. Without `base`, it holds all of `new`."""
    text = {"text": new.header}
    if base is not None and base.header == new.header:
        text = {}
    elif (metadata := _metadata_of(new)) is not None:
        text = {"metadata": metadata}
    file = FileHeader(checksum=_checksum(new.header), **text)
    return make_patch_of(_with_memory(new.tensors), None if base is None else base.tensors, file=file)


def apply_file_patch(patch: bytes, base: WeightFile | None = None) -> WeightFile:
    """Apply a patch to the file `base`. Returns the new file.

    A patch that was made of state dicts makes a file with a header of its own.

    Raises FrameError and MismatchError as `apply_patch` does, and UnsupportedError for dtypes that no safetensors file
    can have.
    """
    version = read_patches(patch)
    older = None if base is None else base.tensors
    require_base(version, older)
    tensors = assemble(version, older or {}, older or {}, lambda name, form: (_new_held(form),) * 2)
    # Files hold equal tensors once for each name.
    distinct = {id(each): each.form.total_bytes for each in tensors.values()}.values()
    total_bytes = sum(each.form.total_bytes for each in tensors.values())
    if not _may_equal(total_bytes - sum(distinct), sum(distinct)):
        raise FrameError(f"the patch makes a file of {total_bytes} bytes, of which only {sum(distinct)} differ")
    header = _new_header(tensors) if version.file is None else _header_after(version.file, base, tensors)
    return WeightFile(header, tensors)


def _may_equal(equal_bytes: int, distinct_bytes: int) -> bool:
    """Whether a file may have `equal_bytes` of tensors that equal others, besides the others."""
    return equal_bytes <= _MAX_EQUAL_SHARE * distinct_bytes + _ALWAYS_EQUAL_BYTES


def _with_memory(tensors: Mapping[str, Held]) -> dict[str, Held]:
    """Tensors of a file, of which those with equal bytes count as one in memory, as far as readers allow."""
    backend, first, found = kernels.cpu_backend(), {}, {}
    equal_bytes = distinct_bytes = 0
    for name, held in tensors.items():
        key, size = (held.form, digest_of(backend, held.data.reshape(-1))), held.form.total_bytes
        # Equal digests don't prove equal bytes.
        is_first = first.setdefault(key, held) is held
        is_equal = not is_first and _bytes_of(first[key]) == _bytes_of(held)
        is_equal = is_equal and _may_equal(equal_bytes + size, distinct_bytes)
        equal_bytes, distinct_bytes = equal_bytes + size * is_equal, distinct_bytes + size * (not is_equal)
        found[name] = held._replace(memory=key if size and (is_first or is_equal) else None)
    return found


def _metadata_of(version: WeightFile) -> dict[str, str] | None:
    """The metadata of a file whose header is what `_new_header` makes of it; None: the header is another one."""
    metadata = json.loads(version.header).get(_METADATA, {})
    is_text = all(isinstance(value, str) for value in metadata.values())
    if is_text and _new_header(version.tensors, metadata) == version.header:
        return metadata
    return None


def _header_after(header: FileHeader, base: WeightFile | None, tensors: Mapping[str, Held]) -> str:
    """The header of the file that a patch makes: the patch has it or its metadata, or it is that of the base."""
    if header.text is not None:
        text = header.text
    elif header.metadata is not None:
        text = _new_header(tensors, header.metadata)
    else:
        text = "" if base is None else base.header
        if _checksum(text) != header.checksum:
            raise MismatchError(
                "the base has the tensors that the patch is for, and another header (metadata, or order of tensors) "
                "than the file that the patch was made with; take that file, or apply the patch by apply_patch"
            )
    if _checksum(text) != header.checksum:
        raise FrameError("the header of the file that the patch makes has another checksum than the patch says")
    return text


def _checksum(header: str) -> int:
    return zlib.crc32(header.encode())


# ------------------------------------------------------------------ headers


def _parse_header(header: bytes) -> tuple[str, list[_Place]]:
    """The text of a header, and its tensors in the order of their bytes. Raises UnsupportedError."""
    # The header is a JSON object: metadata, and a description of each tensor.
    try:
        text = bytes(header).decode()
        described = json.loads(text)
        if not isinstance(described, dict):
            raise ValueError("it must be an object")
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"is not a safetensors file: its header is invalid JSON: {error}") from None
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise UnsupportedError(f"is damaged: {_METADATA} in its header must map names to strings")
    # Tensors lie one behind the other.
    places = [_place_of(name, value) for name, value in described.items()]
    places.sort(key=lambda place: (place.begin, place.end))
    end = 0
    for each in places:
        if each.begin != end:
            raise UnsupportedError(
                f"is damaged: {each.name} begins at byte {each.begin}, where {end} was expected; tensors of a file lie "
                "one behind the other"
            )
        end = each.end
    return text, places


def _place_of(name: str, value: object) -> _Place:
    """What a header says of one tensor. Raises UnsupportedError."""
    # The description is complete.
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        are_sizes = all(type(each) is int and each >= 0 for each in (*shape, begin, end))
        if not isinstance(dtype, str) or not are_sizes or begin > end:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UnsupportedError(f"is damaged: {ascii(name)} lacks dtype, shape or data_offsets in its header") from None
    # The shape fits the bytes. A dtype of a later version of the format has a size that is not known here.
    if dtype in SAFETENSORS_BITS:
        bits = math.prod(shape) * SAFETENSORS_BITS[dtype]
        if bits != 8 * (end - begin):
            raise UnsupportedError(
                f"is damaged: {name} has {end - begin} bytes, and {list(shape)} elements of {dtype} take {bits / 8:g}"
            )
    return _Place(name, dtype, shape, begin, end)


def _new_header(tensors: Mapping[str, Held], metadata: Mapping[str, str] | None = None) -> str:
    """The header that safetensors writes. `metadata` None: that of PyTorch. Raises UnsupportedError."""
    for name, held in tensors.items():
        if held.form.dtype in TORCH_ONLY:
            raise UnsupportedError(
                f"{name}: safetensors files have no {held.form.dtype}; apply the patch by apply_patch"
            )
    # The widest dtypes come first, so that every tensor is aligned; within a dtype, tensors are sorted by name.
    metadata = {"format": "pt"} if metadata is None else metadata
    described, end = {_METADATA: metadata} if metadata else {}, 0
    for name in sorted(tensors, key=lambda name: (-SAFETENSORS_BITS.get(tensors[name].form.dtype, 8), name)):
        form = tensors[name].form
        begin, end = end, end + form.total_bytes
        described[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [begin, end]}
    # Blanks at the end align the first tensor.
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNMENT_BYTES)


def _aligned(data: Tensor) -> Tensor:
    """The same bytes at an address where elements of all dtypes may begin; a copy only where they are not."""
    misaligned = data.data_ptr() % _ALIGNMENT_BYTES or data.storage_offset() % _ALIGNMENT_BYTES
    return data.clone() if misaligned else data
