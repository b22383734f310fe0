"""Makes patches: bytes that turn one version of the weights into another, to the bit, or that hold a whole version.

A patch is a head and an index (index.py), and then the frames of all parts of tensors that the index lists. A tensor
that the index does not list has not changed. A part is cut into frames of up to 1,048,576 elements (boxes.py). A frame
is one of three:

- nothing: none of its elements has changed;
- its elements, as they are: a frame of as many bytes;
- an "Update" of docs/reference/wire-format.md, with a checksum: changes from the base, or from zeros. Where few
  elements have changed, zlib makes it smaller.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..kernels.backend import Backend
from ..kernels.format import DTYPES, HEADER_BYTES, Coding
from ..kernels.scratch import Scratch
from ..kernels.updates import encode_update, max_update_bytes
from .boxes import frames_of
from .index import Contents, Entry, FileHeader, write_head
from .tensors import NARROWER, Held, TensorPart, is_sharded, published_in

# Patches are kept on disks and sent far, so coders are chosen as for a link of 100 Mbit/s: bytes count more than time.
_LINK_PICOSECONDS_PER_BYTE = 80_000

# An update that takes less than this of a byte per element repeats itself, so zlib is tried.
_MAX_PACKED_SHARE = 1 / 32

_scratch = Scratch()


def make_patch(
    new: Mapping[str, Tensor | TensorPart],
    base: Mapping[str, Tensor | TensorPart] | None = None,
    group: dist.ProcessGroup | None = None,
) -> bytes:
    """Make the patch that turns `base` into `new`, to the bit. Without `base`, the patch holds all of `new`.

    With DTensors every rank makes a patch, which holds the changes of its own shards, and talks to no other rank. The
    patches of all ranks together make the new version. Equal replicas of a DTensor are held once. A tensor that is no
    DTensor is in the patch of each rank that passes it.

    Args:
        new: tensors by name, in host memory or on a GPU: plain ones, DTensors, or `TensorPart`s. Tensors that share
            their memory are held once.
        base: the version that the receiver has. A tensor with the same name, dtype, shape and part in both is held as
            changes; it takes no bytes if it has not changed.
        group: the ranks that make patches of one version together. None: all ranks if there are DTensors or
            `TensorPart`s, else this rank alone.

    Raises UnsupportedError, saying what to do, for anything but a mapping of names to dense tensors, and for quantized
    tensors.
    """
    published = published_in(new, "new")
    rank, ranks = rank_among(new, group)
    return make_patch_of(published, None if base is None else published_in(base, "base"), rank, ranks)


def rank_among(state: Mapping[str, Tensor | TensorPart], group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of this rank among those that publish together, and how many they are."""
    if group is None and not (is_sharded(state) and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def make_patch_of(
    new: Mapping[str, Held],
    base: Mapping[str, Held] | None = None,
    rank: int = 0,
    ranks: int = 1,
    file: FileHeader | None = None,
) -> bytes:
    """`make_patch` of what this rank holds.

    Args:
        rank, ranks: a version that `ranks` ranks publish together is all of their patches.
        file: header of the safetensors file that `new` was read from.
    """
    older = (
        {} if base is None else {name: base[name] for name in new if name in base and new[name].is_alike(base[name])}
    )
    coder = _Coder()
    digests, entries, frames = {}, {}, []
    first_in: dict[Hashable, str] = {}  # name of the first tensor in each memory
    for name, held in new.items():
        # A tensor in the memory of an earlier one is listed as that one's name, if the same frames make it.
        first = name if held.memory is None else first_in.setdefault(held.memory, name)
        if first in entries and held.is_alike(new[first]) and _are_equal(older.get(first), older.get(name)):
            entries[name], digests[name] = Entry.for_held(name, held, of=first), digests[first]
            continue
        # A tensor that has not changed is not listed.
        digests[name], changed = _changed(held, older.get(name))
        if name in older and not any(changed):
            continue
        narrow = _narrower(held, older.get(name))
        coded = coder.code(held, older.get(name), changed, held.form.elements(narrow))
        entries[name] = Entry.for_held(
            name,
            held,
            from_base=name in older,
            narrow=narrow,
            frames=tuple(map(len, coded)),
            digests=tuple(digest if frame else 0 for digest, frame in zip(digests[name], coded)),
        )
        frames += coded
    contents = Contents(
        base=None if base is None else identity_of(base),
        version=identity_of(new, digests),
        rank=rank,
        ranks=ranks,
        tensors=tuple(entries.values()),
        gone=tuple(name for name in base or () if name not in new),
        file=file,
    )
    return b"".join([write_head(contents), *frames])


def identity_of(state: Mapping[str, Held], digests: Mapping[str, list[int]] | None = None) -> int:
    """The identity of what a rank holds of a version: 32 bits of the names, forms, parts and bytes of all its tensors.

    Args:
        digests: checksum of each frame of each tensor, whether it has changed or not, if they are known.
    """
    backend = kernels.cpu_backend()
    rows = []
    for name, held in state.items():
        found = digests[name] if digests else [digest_of(backend, held.on_host(box)) for box in frames_of(held.box)]
        rows.append((name, *held.form, *held.box, found))
    return zlib.crc32(json.dumps(sorted(rows, key=lambda row: row[0])).encode())


def digest_of(backend: Backend, x: Tensor) -> int:
    """Checksum of the elements of a frame."""
    return backend.digest(x.view(torch.uint8))


class _Coder:
    """Codes tensors frame by frame, and holds one frame at a time besides the result."""

    def __init__(self):
        self._backend = kernels.cpu_backend()
        self._coding = Coding(costs=self._backend.costs._replace(link=_LINK_PICOSECONDS_PER_BYTE))

    def code(self, held: Held, older: Held | None, changed: list[bool], elements: torch.dtype) -> list[bytes]:
        """The frames of what a rank holds of a tensor, as changes from `older`.

        Args:
            changed: whether something in a frame has changed. Otherwise it is empty.
            elements: dtype of the elements in frames.
        """
        frames = []
        for box, has_changed in zip(frames_of(held.box), changed):
            if not has_changed:
                frames.append(b"")
                continue
            base_x = None if older is None else older.on_host(box).to(elements)
            frames.append(self._frame(held.on_host(box).to(elements), base_x))
        return frames

    def _frame(self, x: Tensor, base_x: Tensor | None) -> bytes:
        # The header of a frame alone would take as much.
        if x.nbytes <= HEADER_BYTES:
            return _bytes_of(x)
        # Without a base, floats are coded themselves, and all other elements as changes from zeros.
        base = torch.zeros_like(x) if base_x is None and x.dtype not in DTYPES else base_x
        room = _scratch.of("frame", max_update_bytes(len(x), x.itemsize), torch.uint8, x.device)
        size = encode_update(self._backend, x, base, self._coding, room)
        if size >= x.nbytes:
            return _bytes_of(x)
        self._backend.seal(room[:size])
        frame = _bytes_of(room[:size])
        # Readers bound the size of a tensor without a base by that of its frames.
        if base_x is not None and size <= _MAX_PACKED_SHARE * len(x):
            return min(frame, zlib.compress(frame), key=len)
        return frame


def _changed(held: Held, older: Held | None) -> tuple[list[int], list[bool]]:
    """The digest of each frame, and whether something in it has changed."""
    backend = kernels.cpu_backend()
    digests, changed = [], []
    for box in frames_of(held.box):
        x = held.on_host(box)
        digests.append(digest_of(backend, x))
        changed.append(older is None or not _have_equal_bytes(x, older.on_host(box)))
    return digests, changed


def _narrower(held: Held, older: Held | None) -> str | None:
    """The narrowest dtype that has all values of a tensor and of its base; None: that of the tensor."""
    if held.box.numel * held.data.itemsize <= HEADER_BYTES:
        return None
    tensors = [held] if older is None else [held, older]
    for narrow in NARROWER.get(held.form.dtype, ()):
        elements = held.form.elements(narrow)
        parts = (each.on_host(box) for each in tensors for box in frames_of(each.box))
        if all(_have_equal_bytes(x, x.to(elements).to(x.dtype)) for x in parts):
            return narrow
    return None


def _bytes_of(x: Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def _have_equal_bytes(x: Tensor, other: Tensor) -> bool:
    """Whether two rows of elements are equal bit by bit. As numbers, NaN differs from itself and -0 equals 0."""
    return torch.equal(x.view(torch.uint8), other.view(torch.uint8))


def _are_equal(a: Held | None, b: Held | None) -> bool:
    """Whether two tensors have the same bytes, or are both absent."""
    if a is None or b is None:
        return a is b
    is_one = a.memory is not None and a.memory == b.memory
    return is_one or all(_have_equal_bytes(a.on_host(box), b.on_host(box)) for box in frames_of(a.box))
