"""Patches: bytes that turn one version of the weights into another, to the bit, or that hold a whole version.

A patch is a head and an index (index.py), and then the frames of all tensors that the index lists. A tensor that the
index does not list has not changed. There are three ways in which frames hold a tensor:

- "changes": one frame for each 1,048,576 elements of the dtype that the index calls `coded`. A frame holds changes from
  the base, see "Updates" in docs/reference/wire-format.md. A frame of 0 bytes: none of its elements has changed.
- "whole": frames of as many elements. Floats of 16, 32 and 64 bits are coded themselves (SPLIT), all other elements as
  changes from zeros.
- "plain": one frame, the tensor's bytes, uncoded.

Applying a patch runs no code from it and unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..core.errors import FrameError, UnsupportedError
from ..kernels.backend import Backend
from ..kernels.format import DTYPES, HEADER_BYTES, Coding, DamagedFrame
from ..kernels.updates import decode_update, encode_update, max_update_bytes
from .index import (
    FRAME_ELEMENTS,
    Contents,
    Description,
    Entry,
    FileHeader,
    check_version,
    coded_as,
    identity_of,
    may_refer,
    read_head,
    require_base,
    write_head,
)
from .items import Item, TensorItems, on_host, tensor_of

# Patches are kept on disks and sent far, so coders are chosen as for a link of 100 Mbit/s: bytes count more than time.
_LINK_PICOSECONDS_PER_BYTE = 80_000

_Held = TypeVar("_Held", Tensor, Item)


def identity(state: Mapping[str, Tensor]) -> int:
    """The identity of a state dict: 32 bits that depend on the names, dtypes, shapes and bytes of all tensors.

    Raises UnsupportedError as `make_patch` does.
    """
    return identity_of(_described(TensorItems(state, "state")))


# ------------------------------------------------------------------ make


def make_patch(new: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None) -> bytes:
    """Make the patch that turns `base` into `new`, to the bit. Without `base`, the patch holds all of `new`.

    Args:
        new: tensors by name, in host memory or on a GPU. Tensors that share their memory, or have equal bytes, are
            held once.
        base: the version that the receiver has. A tensor with the same name, dtype and shape in both is held as
            changes; it takes no bytes if it has not changed.

    Raises UnsupportedError, saying what to do, for anything but a mapping of names to dense tensors, and for quantized
    tensors.
    """
    return make_patch_of_items(TensorItems(new, "new"), None if base is None else TensorItems(base, "base"))


def make_patch_of_items(
    new: Mapping[str, Item], base: Mapping[str, Item] | None = None, file: FileHeader | None = None
) -> bytes:
    """`make_patch` for items.

    Args:
        file: header of the safetensors file that `new` was read from.
    """
    maker = _Maker(new, base)
    for name in new:
        maker.add(name)
    contents = Contents(
        base=None if base is None else identity_of(maker.base_described),
        identity=identity_of(maker.described),
        tensors=maker.entries,
        file=file,
    )
    # Names are listed only where their order does not follow from the base.
    if contents.names_after(maker.base_described) != list(maker.described):
        contents = contents.model_copy(update={"names": list(maker.described)})
    return b"".join([write_head(contents), *maker.frames])


class _Maker:
    """Collects what a patch holds, tensor by tensor.

    Attributes:
        base_described: descriptions of the base's tensors; empty without a base.
        described: descriptions of the new version's tensors that were added.
        entries: rows of the index.
        frames: frames of the tensors in `entries`, in that order.
    """

    def __init__(self, new: Mapping[str, Item], base: Mapping[str, Item] | None):
        self._backend = kernels.cpu_backend()
        self._coding = Coding(costs=self._backend.costs._replace(link=_LINK_PICOSECONDS_PER_BYTE))
        self._new, self._base = new, base
        self.base_described = {} if base is None else _described(base)
        self.described: dict[str, Description] = {}
        self.entries: list[Entry] = []
        self.frames: list[bytes] = []
        self._first_names: dict[Description, str] = {}  # of the first tensor with each description
        self._base_bytes = sum(each.bytes for each in self.base_described.values())
        self._frame_bytes = self._referring_bytes = 0

    def add(self, name: str) -> None:
        """Add a tensor of the new version."""
        item = self._new[name]
        described = self.described[name] = _description(self._backend, item)
        first = self._first_names.setdefault(described, name)
        # A tensor that has not changed is not listed.
        base_data = self._base_data_of(name, described)
        if base_data is not None and torch.equal(item.data, base_data):
            return
        # A tensor with the bytes of an earlier one is listed as that one's name. Equal digests don't prove equal bytes.
        if first != name and torch.equal(item.data, (earlier := self._new[first]).data):
            referring_bytes = self._referring_bytes + described.bytes
            if may_refer(referring_bytes, self._frame_bytes, self._base_bytes):
                self._referring_bytes = referring_bytes
                is_shared = item.memory is not None and item.memory == earlier.memory
                self.entries.append(_entry(name, described, kind="shared" if is_shared else "equal", of=first))
                return
        # All others have frames.
        coded = coded_as(item.dtype)
        kind, frames = _encode(self._backend, item.data, base_data, getattr(torch, coded), self._coding)
        self.entries.append(_entry(name, described, kind=kind, coded=coded, frames=[len(frame) for frame in frames]))
        self.frames += frames
        self._frame_bytes += sum(map(len, frames))

    def _base_data_of(self, name: str, described: Description) -> Tensor | None:
        """The bytes of the base's tensor of this name, if its dtype and shape are the same."""
        if name in self.base_described and self.base_described[name].has_form_of(described):
            return self._base[name].data
        return None


def _entry(name: str, described: Description, **held) -> Entry:
    """A row of the index; `held` says how the patch holds the tensor."""
    return Entry(name=name, **described._replace(shape=list(described.shape))._asdict(), **held)


def _encode(
    backend: Backend, data: Tensor, base_data: Tensor | None, coded: torch.dtype, coding: Coding
) -> tuple[str, list[bytes]]:
    """Code a tensor.

    Args:
        data: the tensor's bytes.
        base_data: bytes of the same tensor in the base, if it has one.
        coded: dtype of the elements in frames.

    Returns `Entry.kind` and the frames.
    """
    # The header of a frame alone would take as much.
    if len(data) <= HEADER_BYTES:
        return "plain", [data.numpy().tobytes()] if len(data) else []
    x = data.view(coded)
    base_x = None if base_data is None else base_data.view(coded)
    room = torch.empty(max_update_bytes(min(len(x), FRAME_ELEMENTS), coded.itemsize), dtype=torch.uint8, device="cpu")
    frames = []
    for part in _parts(x):
        # Where nothing has changed, the frame is empty. Bytes are compared, since NaN differs from itself.
        if base_x is not None and torch.equal(x[part].view(torch.uint8), base_x[part].view(torch.uint8)):
            frames.append(b"")
            continue
        size = encode_update(backend, x[part], _frame_base(x[part], base_x, part), coding, room)
        frames.append(room[:size].numpy().tobytes())
    if sum(map(len, frames)) < len(data):
        return "whole" if base_data is None else "changes", frames
    return "plain", [data.numpy().tobytes()]


# ------------------------------------------------------------------ apply


def apply_patch(patch: bytes, base: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Apply a patch to `base`. Returns the new version, in host memory; `base` stays as it is.

    A tensor that has not changed is not copied: the new version has the tensor object of `base`.

    Args:
        patch: what `make_patch` returned, as bytes or any other object that holds bytes: a bytearray, a memoryview, a
            numpy array, a uint8 tensor in host memory.
        base: the version that the patch was made for. Not needed for a patch that holds a whole version.

    Raises FrameError if the patch is damaged or is not a patch, and MismatchError if `base` is not the version that
    the patch was made for.
    """
    contents, frames = read_patch(patch)
    items = None if base is None else TensorItems(base, "base")
    made = {name: tensor_of(name, item) for name, item in decode_items(contents, frames, items).items()}
    version = assemble(contents, made, base)
    # Equal tensors travel once, but each gets memory of its own, as at the sender.
    for entry in contents.tensors:
        if entry.kind == "equal":
            version[entry.name] = on_host(entry.name, version[entry.name], copy=True)
    return version


def read_patch(patch: bytes) -> tuple[Contents, list[Tensor]]:
    """The index of a patch and its frames, uint8, none of them decoded. Raises FrameError as `apply_patch` does."""
    patch = _bytes_of(patch)
    contents, start = read_head(patch)
    # The frames lie one behind the other, without gaps, up to the end.
    rest = torch.frombuffer(bytearray(patch), dtype=torch.uint8)[start:]
    frames = []
    for entry in contents.tensors:
        for size in entry.frames:
            if size > len(rest):
                raise FrameError(f"{entry.name}: a frame of {size} bytes is missing, only {len(rest)} are left")
            frames.append(rest[:size])
            rest = rest[size:]
    if len(rest):
        raise FrameError(f"{len(rest)} bytes follow the last frame of the patch")
    return contents, frames


def decode_items(contents: Contents, frames: list[Tensor], base: Mapping[str, Item] | None) -> dict[str, Item]:
    """Decode the tensors that a patch has frames of. Raises FrameError and MismatchError as `apply_patch` does."""
    backend = kernels.cpu_backend()
    # Check the patch against the base before anything is decoded.
    base_described = {} if base is None or contents.base is None else _described(base)
    require_base(contents, None if base is None else identity_of(base_described))
    check_version(contents, base_described)
    # Decode each tensor.
    remaining = iter(frames)
    made = {}
    for entry in contents.tensors:
        if entry.of is not None:
            continue
        base_data = None
        if entry.kind == "changes":
            described = base_described.get(entry.name)
            if described is None or not described.has_form_of(entry.description):
                raise FrameError(f"{entry.name}: its base has no tensor of this name, dtype and shape to change")
            base_data = base[entry.name].data
        data = _decode(backend, entry, list(islice(remaining, len(entry.frames))), base_data)
        made[entry.name] = Item(entry.dtype, tuple(entry.shape), data)
    return made


def assemble(contents: Contents, made: Mapping[str, _Held], base: Mapping[str, _Held] | None) -> dict[str, _Held]:
    """Put the new version together.

    Args:
        made: the tensors that the patch has frames of.
        base: the tensors of the base.

    Returns all tensors of the new version, in its order. One that is "equal" or "shared" is the object that it
    refers to.
    """
    kept = base or {}
    refers_to = {entry.name: entry.of for entry in contents.tensors if entry.of is not None}
    version = {}
    for name in contents.names_after(kept):
        source = refers_to.get(name, name)
        version[name] = made[source] if source in made else kept[source]
    return version


def _decode(backend: Backend, entry: Entry, frames: list[Tensor], base_data: Tensor | None) -> Tensor:
    """Decode the bytes of one tensor. Raises FrameError.

    Args:
        base_data: bytes of the same tensor in the base, for "changes".
    """
    data = torch.empty(entry.bytes, dtype=torch.uint8, device="cpu")
    if entry.kind == "plain":
        for frame in frames:  # at most one
            data.copy_(frame)
    else:
        x = data.view(entry.coded_dtype)
        base_x = None if base_data is None else base_data.view(entry.coded_dtype)
        for frame, part in zip(frames, _parts(x)):
            _decode_frame(backend, entry.name, frame, _frame_base(x[part], base_x, part), x[part])
    if backend.digest(data) != entry.digest:
        raise FrameError(f"{entry.name}: its bytes don't have the checksum that the patch says; get the patch again")
    return data


def _decode_frame(backend: Backend, name: str, frame: Tensor, frame_base: Tensor | None, out: Tensor) -> None:
    """Decode one frame of a tensor into `out`. `frame_base` is what `_frame_base` returned. Raises FrameError."""
    # Nothing has changed in these elements.
    if not len(frame):
        out.copy_(frame_base)
        return
    try:
        decode_update(backend, frame, frame_base, out)
    except DamagedFrame as damage:
        raise FrameError(f"{name}: a frame is damaged: {damage}; get the patch again") from damage


def _bytes_of(patch: object) -> memoryview:
    """The bytes that an object holds. Raises UnsupportedError if it holds none, or if they lie apart or on a GPU."""
    try:
        held = memoryview(patch.detach().numpy() if isinstance(patch, Tensor) else patch)
        if held.itemsize == 1:
            return held.cast("B") if held.nbytes else memoryview(b"")
    except (TypeError, RuntimeError):
        pass
    raise UnsupportedError(
        f"patch must be bytes, or hold contiguous bytes in host memory, got {type(patch).__name__}: pass what "
        "make_patch returned, or read_bytes() of a file"
    )


# ------------------------------------------------------------------ for both


def _described(items: Mapping[str, Item]) -> dict[str, Description]:
    """Descriptions of all tensors of a version."""
    backend = kernels.cpu_backend()
    return {name: _description(backend, items[name]) for name in items}


def _description(backend: Backend, item: Item) -> Description:
    return Description(item.dtype, tuple(item.shape), item.data.numel(), backend.digest(item.data))


def _parts(x: Tensor) -> Iterator[slice]:
    """The elements of each frame of a tensor."""
    for first in range(0, len(x), FRAME_ELEMENTS):
        yield slice(first, first + FRAME_ELEMENTS)


def _frame_base(x: Tensor, base_x: Tensor | None, part: slice) -> Tensor | None:
    """What one frame counts changes from.

    Args:
        x: the elements of the frame.
        base_x: the whole tensor in the base; None for a tensor that is held as "whole".
        part: where the frame's elements lie in the tensor.

    Returns None for floats that the base lacks: the frame holds the floats themselves.
    """
    if base_x is not None:
        return base_x[part]
    return None if x.dtype in DTYPES else torch.zeros_like(x)
