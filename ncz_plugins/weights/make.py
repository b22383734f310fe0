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
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from .. import kernels
from ..kernels.arrays import NAMES
from ..kernels.backend import Backend
from ..kernels.format import CHUNK, FLOATS, HEADER_BYTES, Coding
from ..kernels.scratch import Scratch
from ..kernels.updates import COUNTED, encode_update, max_update_bytes
from .boxes import Box, frame_count, frames_of
from .elements import converted, has_values_of, have_equal_bytes
from .forms import NARROWER, Held, are_on_host
from .index import Contents, Entry, FileHeader, write_head
from .keys import require_key, tag_of
from .threads import in_order

# Patches are kept on disks and sent far, so coders are chosen as for a link of 100 Mbit/s: bytes count more than time.
_LINK_PICOSECONDS_PER_BYTE = 80_000

# An update that takes less than this of a byte per code repeats itself, so zlib is tried. Above, zlib saves 3 %.
_MAX_PACKED_SHARE = 1 / 128

_scratch = Scratch()

Digests = Mapping[str, list[int]]
"""Checksum of each frame of each tensor."""


class Snapshot(NamedTuple):
    """What a rank holds of a version, and the checksums of it.

    Attributes:
        held: the tensors.
        digests: checksum of each frame of each tensor.
        identity: 32 bits of the names, forms, parts and bytes of all tensors.
    """

    held: Mapping[str, Held]
    digests: dict[str, list[int]]
    identity: int

    @classmethod
    def of(cls, held: Mapping[str, Held], known: Digests | None = None) -> Snapshot:
        """Read all tensors, each memory once, but those whose `digests` are `known`."""
        digests = _digests(held, known or {})
        rows = [(name, *each.form, *each.box, digests[name]) for name, each in held.items()]
        identity = zlib.crc32(json.dumps(sorted(rows, key=lambda row: row[0])).encode())
        return cls(held, digests, identity)


def _digests(held: Mapping[str, Held], known: Digests) -> dict[str, list[int]]:
    """The checksums of all tensors, of which some may be `known`."""
    # A tensor that shares no memory is one of its own.
    keys = {name: (each.memory or name, each.form, each.box) for name, each in held.items()}
    found = {keys[name]: digests for name, digests in known.items() if name in keys}
    first = {key: held[name] for name, key in keys.items() if key not in found}
    frames = [_Frame(each, box) for each in first.values() for box in frames_of(each.box)]
    read = iter(list(in_order(_digest, frames, _elements, are_on_host(held))))
    found |= {key: [next(read) for _ in range(frame_count(each.box.sizes))] for key, each in first.items()}
    return {name: found[key] for name, key in keys.items()}


def identity_of(state: Mapping[str, Held], known: Digests | None = None) -> int:
    """The identity of what a rank holds of a version, see `Snapshot`."""
    return Snapshot.of(state, known).identity


def digest_of(backend: Backend, x: np.ndarray) -> int:
    """Checksum of the elements of a frame."""
    return backend.digest(x)


def make_patch_of(
    new: Mapping[str, Held],
    base: Mapping[str, Held] | None = None,
    rank: int = 0,
    ranks: int = 1,
    file: FileHeader | None = None,
    key: bytes | None = None,
    number: int | None = None,
    known: Digests | None = None,
    known_base: Digests | None = None,
) -> bytes:
    """The patch that turns what a rank holds of the version `base` into what it holds of `new`.

    Args:
        rank, ranks: a version that `ranks` ranks publish together is all of their patches.
        file: header of the safetensors file that `new` was read from.
        key, number: see `make_patch` in state_dicts.py.
        known, known_base: checksums of tensors of both versions. Others are read for them.
    """
    require_key(key)
    older = {} if base is None else {name: base[name] for name in new if _is_in(name, new, base)}
    same_as = _tied(new, older)
    known, known_base = _with_wide(new, older, known or {}), _with_wide(older, older, known_base or {})
    coded = _coded(new, older, same_as, known, known_base)
    # What was coded has been read for its checksums. What is left is tied, or not in the other version.
    version = Snapshot.of(new, {name: each.digests for name, each in coded.items()})
    read = {name: coded[name].base_digests for name in older if name in coded}
    before = None if base is None else Snapshot.of(base, known_base | read)
    entries = _entries(version, older, same_as, coded)
    contents = Contents(
        base=None if before is None else before.identity,
        version=version.identity,
        rank=rank,
        ranks=ranks,
        number=number,
        tensors=tuple(entries),
        gone=tuple(name for name in base or () if name not in new),
        file=file,
    )
    frames = (frame for entry in entries if entry.of is None for frame in coded[entry.name].frames)
    parts = [write_head(contents, key is not None), *frames]
    return b"".join(parts if key is None else [*parts, tag_of(parts, key)])


def _is_in(name: str, new: Mapping[str, Held], base: Mapping[str, Held]) -> bool:
    """Whether a tensor can be coded as changes from the base."""
    return name in base and new[name].is_alike(base[name])


def _with_wide(held: Mapping[str, Held], names: Iterable[str], known: Digests) -> dict[str, list[int]]:
    """What is known, and the checksums of wide tensors: only one that has changed is then read for narrower values."""
    wide = {name: held[name] for name in names if held[name].form.dtype in NARROWER}
    return {**known, **_digests(wide, known)}


def _tied(new: Mapping[str, Held], older: Mapping[str, Held]) -> dict[str, str]:
    """Tensors in the memory of an earlier one that the same frames make: the name of that one, by theirs."""
    first_in: dict[Hashable, str] = {}
    same_as = {}
    for name, held in new.items():
        first = name if held.memory is None else first_in.setdefault(held.memory, name)
        if first != name and held.is_alike(new[first]) and _are_equal(older.get(first), older.get(name)):
            same_as[name] = first
    return same_as


class _Coded(NamedTuple):
    """The frames of a tensor, and the checksums of their elements in both versions. `narrow`: see `Entry`."""

    narrow: str | None
    frames: list[bytes]
    digests: list[int]
    base_digests: list[int]


def _coded(
    new: Mapping[str, Held], older: Mapping[str, Held], same_as: Mapping[str, str], known: Digests, known_base: Digests
) -> dict[str, _Coded]:
    """All tensors that are not the same as another one. `older`: those of the base that they are changes of."""
    frames, narrowed = [], {}
    for name, held in new.items():
        if name in same_as:
            continue
        base = older.get(name)
        unknown = [None] * frame_count(held.box.sizes)
        digests, before = known.get(name, unknown), unknown if base is None else known_base.get(name, unknown)
        narrow = narrowed[name] = None if digests == before != unknown else _narrower(held, base)
        elements = held.form.elements(narrow)
        rows = zip(frames_of(held.box), digests, before, strict=True)
        frames += [_Frame(held, box, base, elements, *both) for box, *both in rows]
    on_host = are_on_host(new) and are_on_host(older)
    found = iter(list(in_order(_code, frames, _elements, on_host)))
    coded = {}
    for name, narrow in narrowed.items():
        rows = [next(found) for _ in range(frame_count(new[name].box.sizes))]
        coded[name] = _Coded(narrow, *map(list, zip(*rows) if rows else ((), (), ())))
    return coded


def _entries(
    new: Snapshot, older: Mapping[str, Held], same_as: Mapping[str, str], coded: Mapping[str, _Coded]
) -> list[Entry]:
    """The rows of the tensors that are new or have changed."""
    entries: dict[str, Entry] = {}
    for name, held in new.held.items():
        if name in same_as:
            if same_as[name] in entries:
                entries[name] = Entry.for_held(name, held, of=same_as[name])
            continue
        frames = coded[name].frames
        if name not in older or any(frames):
            entries[name] = Entry.for_held(
                name,
                held,
                from_base=name in older,
                narrow=coded[name].narrow,
                frames=tuple(map(len, frames)),
                digests=tuple(digest if frame else 0 for digest, frame in zip(new.digests[name], frames)),
            )
    return list(entries.values())


# ------------------------------------------------------------------ frames, each in a thread


class _Frame(NamedTuple):
    """A frame to hash or to code.

    Attributes:
        held: the tensor.
        box: the frame's elements.
        older: the tensor in the base.
        elements: dtype of the elements in the frame.
        digest, base_digest: checksums of the elements in both versions, if they are known.
    """

    held: Held
    box: Box
    older: Held | None = None
    elements: str | None = None
    digest: int | None = None
    base_digest: int | None = None


def _elements(frame: _Frame) -> int:
    return frame.box.numel


def _digest(frame: _Frame) -> int:
    return digest_of(kernels.cpu_backend(), frame.held.on_host(frame.box))


def _code(frame: _Frame) -> tuple[bytes, int, int | None]:
    """The bytes of a frame, none if nothing has changed, and the checksums of its elements in both versions."""
    backend = kernels.cpu_backend()
    x = frame.held.on_host(frame.box)
    base_x = None if frame.older is None else frame.older.on_host(frame.box)
    digest, base_digest = frame.digest, frame.base_digest
    if digest is None:
        digest = digest_of(backend, x)
    if base_digest is None and base_x is not None:
        base_digest = digest_of(backend, base_x)
    # Equal checksums don't prove equal bytes.
    is_same = base_x is not None and digest == base_digest and have_equal_bytes(x, base_x)
    return b"" if is_same else _coded_frame(backend, frame, x, base_x), digest, base_digest


def _coded_frame(backend: Backend, frame: _Frame, x: np.ndarray, base_x: np.ndarray | None) -> bytes:
    """The bytes of a frame that has changed."""
    x, base_x = converted(x, frame.elements), None if base_x is None else converted(base_x, frame.elements)
    # The header of a frame alone would take as much.
    if x.nbytes <= HEADER_BYTES:
        return x.tobytes()
    # Without a base, floats are coded themselves, and all other elements as changes from zeros.
    base = np.zeros_like(x) if base_x is None and NAMES[x.dtype] not in FLOATS else base_x
    room = _scratch.of("frame", max_update_bytes(len(x), x.itemsize), "uint8")
    coding = Coding(costs=backend.costs._replace(link=_LINK_PICOSECONDS_PER_BYTE))
    size = encode_update(backend, x, base, coding, room)
    if size >= x.nbytes:
        return x.tobytes()
    backend.seal(room[:size])
    coded = room[:size].tobytes()
    # Readers bound the size of a tensor without a base by that of its frames.
    codes = len(x) if NAMES[x.dtype] in COUNTED else x.nbytes
    if base_x is not None and size <= _MAX_PACKED_SHARE * codes:
        return min(coded, zlib.compress(coded), key=len)
    return coded


def _narrower(held: Held, older: Held | None) -> str | None:
    """The narrowest dtype that has all values of a tensor and of its base; None: that of the tensor."""
    if held.box.numel * held.data.itemsize <= HEADER_BYTES:
        return None
    tensors = [held] if older is None else [held, older]
    for narrow in NARROWER.get(held.form.dtype, ()):
        elements = held.form.elements(narrow)
        parts = (each.on_host(box) for each in tensors for box in frames_of(each.box))
        if all(has_values_of(elements, x[:CHUNK]) and has_values_of(elements, x) for x in parts):
            return narrow
    return None


def _are_equal(a: Held | None, b: Held | None) -> bool:
    """Whether two tensors have the same bytes, or are both absent."""
    if a is None or b is None:
        return a is b
    is_one = a.memory is not None and a.memory == b.memory
    return is_one or all(have_equal_bytes(a.on_host(box), b.on_host(box)) for box in frames_of(a.box))
