"""Versions of weights as bytes: what has changed since another version, or everything, without loss.

All numbers are little endian. The head:

| offset | size | field | |
|---|---|---|---|
| 0 | 4 | magic | `4E 43 5A 50`, "NCZP" |
| 4 | 4 | format | 2 |
| 8 | 4 | bytes of the index | |
| 12 | 4 | CRC-32 of the index | |
| 16 | | index | JSON, compressed by zlib, 64 times at the most: see index.py |

The frames of all tensors in the index follow, in its order. A tensor is a row of elements of its type `coded`, and has
a frame for each 1,048,576 of them. Those of "changes" and "whole" are as the wire format says under "Updates"; there is
no older version of a "whole" tensor, but integers count as changes of zeros. The only frame of a "plain" tensor are its
bytes. Nothing in a patch is run or unpickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..core.errors import FrameError, UnsupportedError
from ..kernels.backend import Backend
from ..kernels.format import DTYPES, HEADER_BYTES, Coding, DamagedFrame
from ..kernels.updates import decode_update, encode_update, max_update_bytes
from . import index as patch_index
from .index import FRAME, Contents, Description, Entry, FileHeader
from .items import Item, TensorItems, on_host, tensor_of

_MAGIC, _FORMAT = 0x505A434E, 2  # "NCZP", little endian
_HEAD = struct.Struct("<IIII")
_PICOSECONDS_PER_BYTE = 80_000  # 100 Mbit/s: patches are kept and sent far, so bytes count for more than cycles
_T = TypeVar("_T")


def identity(state: Mapping[str, Tensor]) -> int:
    """What tells versions of a state dict apart: 32 bits of the names, dtypes, shapes and bytes of all tensors.

    Raises UnsupportedError as `make_patch` does.
    """
    return patch_index.identity_of(_described(TensorItems(state, "state")))


def make_patch(new: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None) -> bytes:
    """What turns `base` into `new`, to the bit; without a base, all of `new`.

    Args:
        new: tensors by name, in host memory or on a GPU. Those that share their memory, or are equal, are held once.
        base: the same, of the version that the receiver has. A tensor that it has by the same name, dtype and shape is
            held as what has changed.

    Raises UnsupportedError for what is no mapping of names to dense tensors, and for quantized tensors.
    """
    return make_patch_of_items(TensorItems(new, "new"), None if base is None else TensorItems(base, "base"))


def make_patch_of_items(
    new: Mapping[str, Item], base: Mapping[str, Item] | None = None, file: FileHeader | None = None
) -> bytes:
    """As `make_patch`, of any tensors; `file` is what the index says of a file."""
    maker = _Maker(new, base)
    for name in new:
        maker.add(name)
    contents = Contents(
        base=None if base is None else patch_index.identity_of(maker.older),
        identity=patch_index.identity_of(maker.described),
        tensors=maker.entries,
        file=file,
    )
    if contents.names_after(maker.older) != list(maker.described):
        contents = contents.model_copy(update={"names": list(maker.described)})
    index = patch_index.to_bytes(contents)
    return b"".join([_HEAD.pack(_MAGIC, _FORMAT, len(index), zlib.crc32(index)), index, *maker.frames])


class _Maker:
    """A patch in the making.

    Attributes:
        older, described: what is known of each tensor of the base, and of the new version.
        entries, frames: what the patch holds of those that have changed.
    """

    def __init__(self, new: Mapping[str, Item], base: Mapping[str, Item] | None):
        self._backend = kernels.cpu_backend()
        self._coding = Coding(costs=self._backend.costs._replace(link=_PICOSECONDS_PER_BYTE))
        self._new, self._base = new, base
        self.older: dict[str, Description] = {} if base is None else _described(base)
        self.described: dict[str, Description] = {}
        self.entries: list[Entry] = []
        self.frames: list[bytes] = []
        self._firsts: dict[Description, str] = {}  # the first tensor of each description
        self._older_bytes = sum(each.bytes for each in self.older.values())
        self._frame_bytes = self._copied_bytes = 0

    def add(self, name: str) -> None:
        """Hold a tensor of the new version."""
        item = self._new[name]
        own = self.described[name] = _description(self._backend, item)
        first = self._firsts.setdefault(own, name)
        # What has not changed is not listed.
        before = self._base[name].data if name in self.older and self.older[name][:3] == own[:3] else None
        if before is not None and torch.equal(item.data, before):
            return
        # A tensor with the bytes of another one is held as its name.
        if first != name and torch.equal(item.data, (other := self._new[first]).data):
            copied = self._copied_bytes + own.bytes
            if patch_index.may_refer(copied, self._frame_bytes, self._older_bytes):
                self._copied_bytes = copied
                shared = item.memory is not None and item.memory == other.memory
                self._list(name, own, kind="shared" if shared else "equal", of=first)
                return
        coded = patch_index.coded_as(item)
        kind, made = _encoded(self._backend, item.data, before, coded, self._coding)
        self._list(name, own, kind=kind, coded=str(coded).removeprefix("torch."), frames=[len(each) for each in made])
        self.frames += made
        self._frame_bytes += sum(map(len, made))

    def _list(self, name: str, own: Description, **fields) -> None:
        self.entries.append(Entry(name=name, **own._replace(shape=list(own.shape))._asdict(), **fields))


def apply_patch(patch: bytes, base: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The version that a patch makes of `base`, in host memory. What has not changed are the tensors of `base`.

    Args:
        patch: what `make_patch` returned, as bytes or as whatever has bytes: a bytearray, a memoryview, an array of
            numpy, a tensor of uint8 in host memory.

    Raises FrameError for a patch that is damaged or none at all, and MismatchError if `base` is not the version that it
    was made for. `base` stays as it is.
    """
    contents, frames = read_patch(patch)
    items = None if base is None else TensorItems(base, "base")
    made = {name: tensor_of(name, item) for name, item in decode_items(contents, frames, items).items()}
    return assemble(contents, made, base, lambda name, other: on_host(name, other, copy=True))


def decode_items(contents: Contents, frames: list[Tensor], base: Mapping[str, Item] | None) -> dict[str, Item]:
    """The tensors that a patch has frames of. Raises FrameError and MismatchError as `apply_patch`."""
    backend, rest = kernels.cpu_backend(), iter(frames)
    older = {} if base is None or contents.base is None else _described(base)
    patch_index.require_base(contents, None if base is None else patch_index.identity_of(older))
    patch_index.check_version(contents, older)
    made = {}
    for entry in contents.tensors:
        if entry.of is not None:
            continue
        if entry.kind == "changes" and (entry.name not in older or older[entry.name][:3] != entry.description[:3]):
            raise FrameError(f"{entry.name}: the patch changes a tensor that its base doesn't have so")
        before = base[entry.name].data if entry.kind == "changes" else None
        data = _decoded(backend, entry, list(islice(rest, len(entry.frames))), before)
        made[entry.name] = Item(entry.dtype, tuple(entry.shape), data)
    return made


def assemble(
    contents: Contents, made: Mapping[str, _T], base: Mapping[str, _T] | None, copy: Callable[[str, _T], _T]
) -> dict[str, _T]:
    """All tensors of the new version, of those that were `made` and those of the base.

    Args:
        copy: copies a tensor, for the name that it is given.
    """
    older = base or {}
    entries = {entry.name: entry for entry in contents.tensors}
    version = {}
    for name in contents.names_after(older):
        entry = entries.get(name)
        source = name if entry is None or entry.of is None else entry.of
        found = made[source] if source in made else older[source]
        version[name] = copy(name, found) if entry is not None and entry.kind == "equal" else found
    return version


def read_patch(patch: bytes) -> tuple[Contents, list[Tensor]]:
    """The index of a patch, and its frames, uint8, none of them decoded. Raises FrameError, as `apply_patch`."""
    patch = _bytes_of(patch)
    if len(patch) < _HEAD.size:
        raise FrameError(f"{len(patch)} bytes are too few for a patch")
    magic, version, size, checksum = _HEAD.unpack_from(patch)
    if magic != _MAGIC:
        raise FrameError(f"magic is {magic:#010x}, not {_MAGIC:#010x}: not a patch")
    if version != _FORMAT:
        raise FrameError(f"the patch has format {version}; this build reads format {_FORMAT}")
    index = patch[_HEAD.size : _HEAD.size + size]
    if len(index) != size or zlib.crc32(index) != checksum:
        raise FrameError("the head of the patch is damaged: its checksum does not fit")
    contents = patch_index.from_bytes(index)
    data = torch.frombuffer(bytearray(patch), dtype=torch.uint8)[_HEAD.size + size :]
    frames = []
    for entry in contents.tensors:
        for size in entry.frames:
            if size > len(data):
                raise FrameError(f"{entry.name}: a frame of {size} bytes is missing, only {len(data)} are left")
            frames.append(data[:size])
            data = data[size:]
    if len(data):
        raise FrameError(f"{len(data)} bytes follow the last frame of the patch")
    return contents, frames


def _bytes_of(patch: object) -> memoryview:
    """The bytes of a patch, whatever holds them. Raises UnsupportedError."""
    try:
        held = memoryview(patch.detach().numpy() if isinstance(patch, Tensor) else patch)
        if held.itemsize == 1:
            return held.cast("B") if held.nbytes else memoryview(b"")
    except (TypeError, RuntimeError):  # what has no bytes, bytes that don't lie in a row, or on a GPU
        pass
    raise UnsupportedError(
        f"patch must be bytes, or hold bytes in a row in host memory, got {type(patch).__name__}: pass what make_patch "
        "returned, or of a file its Path(...).read_bytes()"
    )


def _described(items: Mapping[str, Item]) -> dict[str, Description]:
    backend = kernels.cpu_backend()
    return {name: _description(backend, items[name]) for name in items}


def _description(backend: Backend, item: Item) -> Description:
    return Description(item.dtype, tuple(item.shape), item.data.numel(), backend.digest(item.data))


def _older_elements(coded: torch.dtype, before: Tensor | None, elements: int) -> Callable[[slice], Tensor | None]:
    """What frames hold changes of, by their elements: an older version, zeros, or None for floats themselves."""
    if before is not None:
        return before.view(coded).__getitem__
    if coded in DTYPES:
        return lambda part: None
    zeros = torch.zeros(min(elements, FRAME), dtype=coded, device="cpu")
    return lambda part: zeros[: min(part.stop, elements) - part.start]


def _encoded(
    backend: Backend, data: Tensor, before: Tensor | None, coded: torch.dtype, coding: Coding
) -> tuple[str, list[bytes]]:
    """How a tensor is held, and its frames."""
    if len(data) <= HEADER_BYTES:  # of a frame
        return "plain", [data.numpy().tobytes()] if len(data) else []
    x = data.view(coded)
    room = torch.empty(max_update_bytes(min(len(x), FRAME), coded.itemsize), dtype=torch.uint8, device="cpu")
    older = _older_elements(coded, before, len(x))
    frames = []
    for first in range(0, len(x), FRAME):
        part = slice(first, first + FRAME)
        base = older(part)
        if before is not None and torch.equal(x[part].view(torch.uint8), base.view(torch.uint8)):
            frames.append(b"")
            continue
        size = encode_update(backend, x[part], base, coding, room)
        frames.append(room[:size].numpy().tobytes())
    if sum(map(len, frames)) < len(data):
        return "whole" if before is None else "changes", frames
    return "plain", [data.numpy().tobytes()]


def _decoded(backend: Backend, entry: Entry, frames: list[Tensor], before: Tensor | None) -> Tensor:
    """The bytes of a tensor of the new version. Raises FrameError."""
    data = torch.empty(entry.bytes, dtype=torch.uint8, device="cpu")
    if entry.kind == "plain":
        for frame in frames:
            data.copy_(frame)
    else:
        out = data.view(entry.coded_dtype)
        older = _older_elements(out.dtype, before, len(out))
        for number, frame in enumerate(frames):
            part = slice(number * FRAME, (number + 1) * FRAME)
            _decode(backend, entry.name, frame, older(part), out[part])
    if backend.digest(data) != entry.digest:
        raise FrameError(f"{entry.name}: its checksum is not the one that the patch says; get the patch again")
    return data


def _decode(backend: Backend, name: str, frame: Tensor, before: Tensor | None, out: Tensor) -> None:
    if not len(frame):
        out.copy_(before)
        return
    try:
        decode_update(backend, frame, before, out)
    except DamagedFrame as damage:
        raise FrameError(f"{name}: a frame is damaged: {damage}; get the patch again") from damage
