"""Files of safetensors, read and written byte by byte: whatever dtypes they have, none of it passes through torch's.

A file is 8 bytes, the size of the header; the header, JSON; and the bytes of all tensors, without gaps.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..core.errors import FrameError, MismatchError, UnsupportedError
from .index import FileHeader
from .items import TORCH_ONLY, Item
from .patch import assemble, decode_items, make_patch_of_items, read_patch

_METADATA = "__metadata__"
_SIZE_BYTES = 8  # of the header's size; a header that we make is filled up with blanks to a multiple of it
# Bits of an element. Files may have dtypes that are not here, which no size tells.
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32},
    **{"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64},
}


class WeightFile(NamedTuple):
    """What a file of safetensors holds: its header as it stands there, and its tensors."""

    header: str
    items: dict[str, Item]


class _Place(NamedTuple):
    """Where a tensor lies, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_file(data: bytes) -> WeightFile:
    """The contents of a file. Raises UnsupportedError, which says what is wrong, for what is no file of safetensors."""
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    if not 2 <= size <= len(data) - _SIZE_BYTES:
        raise UnsupportedError(
            f"is cut off, or no file of safetensors: of {len(data)} bytes, its header would take {size}"
        )
    text, places = _parsed(data[_SIZE_BYTES : _SIZE_BYTES + size])
    rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)[_SIZE_BYTES + size :]
    end = places[-1].end if places else 0
    if end != len(rest):
        raise UnsupportedError(f"is damaged: its tensors take {end} bytes, and {len(rest)} follow its header")
    items = {each.name: Item(each.dtype, each.shape, _aligned(rest[each.begin : each.end])) for each in places}
    return WeightFile(text, items)


def file_of(version: WeightFile) -> bytes:
    """The reverse. Raises FrameError for a header that is not that of these tensors."""
    try:
        _, places = _parsed(version.header.encode())
    except UnsupportedError as error:
        raise FrameError(f"the file that it makes {error}") from None
    described = {name: (item.dtype, tuple(item.shape), len(item.data)) for name, item in version.items.items()}
    if {each.name: (each.dtype, each.shape, each.end - each.begin) for each in places} != described:
        raise FrameError("the header of the file that it makes is not that of its tensors")
    size = len(version.header.encode()).to_bytes(_SIZE_BYTES, "little")
    return b"".join([size, version.header.encode(), *(version.items[each.name].data.numpy() for each in places)])


def make_file_patch(new: WeightFile, base: WeightFile | None = None) -> bytes:
    """What turns one file into another one, byte by byte; without a base, all of it."""
    checksum = zlib.crc32(new.header.encode())
    text = None if base is not None and base.header == new.header else new.header
    header = FileHeader(checksum=checksum, text=text)
    return make_patch_of_items(new.items, None if base is None else base.items, header)


def apply_file_patch(patch: bytes, base: WeightFile | None = None) -> WeightFile:
    """The file that a patch makes of `base`. Of a patch that was made of no file it has a header of ours.

    Raises FrameError and MismatchError as `apply_patch`, and UnsupportedError for dtypes that no file has.
    """
    contents, frames = read_patch(patch)
    older = None if base is None else base.items
    items = assemble(contents, decode_items(contents, frames, older), older, lambda name, item: item)
    if contents.file is None:
        return WeightFile(_header_of(items), items)
    header = contents.file.text
    if header is None:
        header = "" if base is None else base.header
        if zlib.crc32(header.encode()) != contents.file.checksum:
            raise MismatchError(
                "the base has the tensors that the patch is for, and another header (metadata, or order of tensors) "
                "than the file that the patch was made with; take that file, or apply the patch by apply_patch"
            )
    if zlib.crc32(header.encode()) != contents.file.checksum:
        raise FrameError("the header of the file that it makes does not have the checksum that the patch says")
    return WeightFile(header, items)


def _parsed(header: bytes) -> tuple[str, list[_Place]]:
    """The text of a header, and its tensors in the order of their bytes. Raises UnsupportedError."""
    try:
        text = bytes(header).decode()
        described = json.loads(text)
        if not isinstance(described, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"is no file of safetensors: its header is no JSON: {error}") from None
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise UnsupportedError(f"is damaged: {_METADATA} in its header must map names to strings")
    places = sorted((_place(name, value) for name, value in described.items()), key=lambda each: each[3:])
    end = 0
    for each in places:
        if each.begin != end:
            raise UnsupportedError(
                f"is damaged: {each.name} begins at byte {each.begin}, where {end} was expected; tensors of a file lie "
                "one behind the other"
            )
        end = each.end
    return text, places


def _place(name: str, value: object) -> _Place:
    """What a header says of a tensor. Raises UnsupportedError."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(each) is int and each >= 0 for each in (*shape, begin, end))
        if not isinstance(dtype, str) or not whole or begin > end:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UnsupportedError(f"is damaged: {ascii(name)} lacks dtype, shape or data_offsets in its header") from None
    bits = math.prod(shape) * _BITS.get(dtype, 0)
    if dtype in _BITS and bits != 8 * (end - begin):
        raise UnsupportedError(
            f"is damaged: {name} has {end - begin} bytes, and {list(shape)} elements of {dtype} take {bits / 8:g}"
        )
    return _Place(name, dtype, shape, begin, end)


def _header_of(items: Mapping[str, Item]) -> str:
    """A header for tensors of no file, such as safetensors writes for those of torch: the widest dtypes first."""
    for name, item in items.items():
        if item.dtype in TORCH_ONLY:
            raise UnsupportedError(f"{name}: files of safetensors have no {item.dtype}; apply the patch by apply_patch")
    described, end = {_METADATA: {"format": "pt"}}, 0
    for name in sorted(items, key=lambda name: (-_BITS.get(items[name].dtype, 8), name)):
        item = items[name]
        begin, end = end, end + len(item.data)
        described[name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _SIZE_BYTES)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """The same bytes, at a place where elements of all sizes may begin."""
    return data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
