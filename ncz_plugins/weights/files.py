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

from ..core.errors import FrameError, MismatchError, UnsupportedError
from .index import FileHeader
from .items import SAFETENSORS_BITS, TORCH_ONLY, Item
from .patch import assemble, decode_items, make_patch_of_items, read_patch

_METADATA = "__metadata__"  # key of a header that is not a tensor
_SIZE_BYTES = 8  # of the header's size
_ALIGNMENT_BYTES = 8  # of the first tensor, in files that get a new header; of every item in memory


class WeightFile(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        header: text of the header.
        items: tensors by name, in the order of their bytes.
    """

    header: str
    items: dict[str, Item]


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
    items = {each.name: Item(each.dtype, each.shape, _aligned(rest[each.begin : each.end])) for each in places}
    return WeightFile(header, items)


def file_of(version: WeightFile) -> bytes:
    """The bytes of a file. Raises FrameError if the header does not describe the tensors."""
    header = version.header.encode()
    try:
        _, places = _parse_header(header)
    except UnsupportedError as error:
        raise FrameError(f"the file that the patch makes {error}") from None
    described = {each.name: (each.dtype, each.shape, each.end - each.begin) for each in places}
    if described != {name: (item.dtype, tuple(item.shape), len(item.data)) for name, item in version.items.items()}:
        raise FrameError("the header of the file that the patch makes does not describe its tensors")
    size = len(header).to_bytes(_SIZE_BYTES, "little")
    return b"".join([size, header, *(version.items[each.name].data.numpy() for each in places)])


# ------------------------------------------------------------------ patches of files


def make_file_patch(new: WeightFile, base: WeightFile | None = None) -> bytes:
    """Make the patch that turns the file `base` into `new`, byte by byte. Without `base`, it holds all of `new`."""
    is_same = base is not None and base.header == new.header
    header = FileHeader(checksum=_checksum(new.header), text=None if is_same else new.header)
    return make_patch_of_items(new.items, None if base is None else base.items, header)


def apply_file_patch(patch: bytes, base: WeightFile | None = None) -> WeightFile:
    """Apply a patch to the file `base`. Returns the new file.

    A patch that was made of state dicts makes a file with a header of its own.

    Raises FrameError and MismatchError as `apply_patch` does, and UnsupportedError for dtypes that no safetensors file
    can have.
    """
    contents, frames = read_patch(patch)
    base_items = None if base is None else base.items
    items = assemble(contents, decode_items(contents, frames, base_items), base_items)
    header = _new_header(items) if contents.file is None else _header_after(contents.file, base)
    return WeightFile(header, items)


def _header_after(header: FileHeader, base: WeightFile | None) -> str:
    """The header of the file that a patch makes: the patch has it, or it is that of the base."""
    if header.text is not None:
        if _checksum(header.text) != header.checksum:
            raise FrameError("the header of the file that the patch makes has another checksum than the patch says")
        return header.text
    text = "" if base is None else base.header
    if _checksum(text) != header.checksum:
        raise MismatchError(
            "the base has the tensors that the patch is for, and another header (metadata, or order of tensors) "
            "than the file that the patch was made with; take that file, or apply the patch by apply_patch"
        )
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


def _new_header(items: Mapping[str, Item]) -> str:
    """A header for tensors that come from a state dict, as safetensors writes it. Raises UnsupportedError."""
    for name, item in items.items():
        if item.dtype in TORCH_ONLY:
            raise UnsupportedError(f"{name}: safetensors files have no {item.dtype}; apply the patch by apply_patch")
    # The widest dtypes come first, so that every tensor is aligned; within a dtype, tensors are sorted by name.
    described, end = {_METADATA: {"format": "pt"}}, 0
    for name in sorted(items, key=lambda name: (-SAFETENSORS_BITS.get(items[name].dtype, 8), name)):
        item = items[name]
        begin, end = end, end + len(item.data)
        described[name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [begin, end]}
    # Blanks at the end align the first tensor.
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNMENT_BYTES)


def _aligned(data: Tensor) -> Tensor:
    """The same bytes at an address where elements of all dtypes may begin; a copy only where they are not."""
    misaligned = data.data_ptr() % _ALIGNMENT_BYTES or data.storage_offset() % _ALIGNMENT_BYTES
    return data.clone() if misaligned else data
