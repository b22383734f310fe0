"""Applies patches: decodes their frames, and makes the tensors of a new version.

The patches of all ranks that published a version belong together (`read_patches`). A receiver may hold other parts of
the tensors than the publishers: it decodes the frames that overlap its own part, one at a time, and keeps the overlap.
Applying a patch runs no code from it and unpickles nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from .. import kernels
from ..core.errors import FrameError, MismatchError, UnsupportedError
from ..kernels.arrays import numpy_dtype
from ..kernels.backend import require_seals
from ..kernels.format import DamagedFrame
from ..kernels.updates import decode_update, max_update_bytes
from .boxes import Box, frames_of
from .elements import Changed, bits_of, changes_of, converted, copy, shaped
from .forms import Form, Held
from .index import Contents, FileHeader, read_head
from .keys import without_tag
from .make import digest_of, identity_of
from .threads import in_order

if TYPE_CHECKING:
    from ..kernels.arrays import Array

_ZLIB = 0x78  # first byte of what zlib packed; that of an update is 4E

_Made = TypeVar("_Made")


# ------------------------------------------------------------------ what patches hold


class Source(NamedTuple):
    """A part of a tensor that a patch holds. `from_base`, `digests`: see `Entry`. `elements`: dtype in frames."""

    form: Form
    box: Box
    elements: str
    from_base: bool
    digests: tuple[int, ...]
    frames: list[memoryview]


class Version(NamedTuple):
    """What the patches of all ranks that published one version hold.

    Attributes:
        contents: index of each patch, in order of ranks.
        parts: what they hold of each tensor. No two parts overlap.
        same_as: names of tensors that share the memory of another one at the publishers.
        is_whole: whether no patch needs a base.
    """

    contents: list[Contents]
    parts: dict[str, list[Source]]
    same_as: dict[str, str]

    @property
    def is_whole(self) -> bool:
        return all(each.base is None for each in self.contents)

    @property
    def gone(self) -> set[str]:
        """Names of tensors of the base that the new version lacks."""
        return {name for each in self.contents for name in each.gone} - self.parts.keys()

    @property
    def file(self) -> FileHeader | None:
        return self.contents[0].file


def read_patches(patch: bytes | Sequence[bytes], key: bytes | None = None) -> Version:
    """Read the patches of all ranks, without decoding a frame. Raises PatchKeyError, FrameError and MismatchError."""
    patches = patch if isinstance(patch, (list, tuple)) else [patch]
    read = sorted((read_patch(each, key) for each in patches), key=lambda each: each[0].rank)
    found, [ranks, *others] = [contents.rank for contents, _ in read], {contents.ranks for contents, _ in read} or [0]
    if others or len(found) != ranks or found != list(range(len(found))):
        raise MismatchError(
            f"these are patches of ranks {found[:20]} of {ranks}: pass the patches of all ranks that published the "
            "version, each once"
        )
    _require_one_version([contents for contents, _ in read])
    # Collect the parts of each tensor.
    parts: dict[str, list[Source]] = {}
    same_as: dict[str, str] = {}
    for contents, sources in read:
        for entry in contents.tensors:
            parts.setdefault(entry.name, []).append(sources[entry.of or entry.name])
            if entry.of is not None:
                same_as[entry.name] = entry.of
    return Version(
        [contents for contents, _ in read], {name: _distinct(name, each) for name, each in parts.items()}, same_as
    )


def _require_one_version(patches: list[Contents]) -> None:
    """Raise MismatchError if patches say that they are of different versions."""
    ranks: dict[int, list[int]] = {}
    for each in patches:
        if each.number is not None:
            ranks.setdefault(each.number, []).append(each.rank)
    if len(ranks) > 1:
        listed = [f"{number} (rank{'s' * (len(of) > 1)} {', '.join(map(str, of[:8]))})" for number, of in ranks.items()]
        raise MismatchError(
            f"these are patches of versions {' and '.join(listed[:8])}: pass those that all ranks made of one "
            "version. If ranks count differently, as after a restart of one, make new publishers on all of them"
        )


def read_patch(patch: bytes, key: bytes | None = None) -> tuple[Contents, dict[str, Source]]:
    """The index of one patch, and the parts that it has frames of. Raises PatchKeyError and FrameError."""
    patch = without_tag(_bytes_of(patch), key)
    contents, start = read_head(patch)
    # The frames lie one behind the other, without gaps, up to the end.
    rest = patch[start:]
    sources = {}
    for entry in contents.tensors:
        frames = []
        for size in entry.frames:
            if size > len(rest):
                raise FrameError(f"{entry.name}: a frame of {size} bytes is missing, only {len(rest)} are left")
            frames.append(rest[:size])
            rest = rest[size:]
        elements = entry.form.elements(entry.narrow)
        sources[entry.name] = Source(entry.form, entry.box, elements, entry.from_base, entry.digests, frames)
    if len(rest):
        raise FrameError(f"{len(rest)} bytes follow the last frame of the patch")
    return contents, sources


def _distinct(name: str, sources: list[Source]) -> list[Source]:
    """The parts of one tensor, each once. Raises FrameError if parts overlap, or are parts of different tensors."""
    if len(sources) == 1:
        return sources
    if len({source.form for source in sources}) > 1:
        raise FrameError(f"{name}: ranks published tensors of different dtypes or shapes")
    distinct: list[Source] = []
    near: list[Source] = []  # those that reach into the rows of the next part
    for source in sorted(sources, key=lambda source: source.box):
        near = [other for other in near if _rows(other).stop > _rows(source).start]
        overlapping = [other for other in near if other.box.overlap(source.box)]
        if not overlapping:
            distinct.append(source)
            near.append(source)
        elif [(other.box, other.digests) for other in overlapping] != [(source.box, source.digests)]:
            raise FrameError(f"{name}: two ranks published different values of the same elements")
    return distinct


def _rows(source: Source) -> range:
    """The part's range in the first dimension."""
    first, size = (source.box.offsets or (0,))[0], (source.box.sizes or (1,))[0]
    return range(first, first + size)


def _bytes_of(patch: object) -> memoryview:
    """The bytes that an object holds. Raises UnsupportedError if it holds none, or if they lie apart or on a GPU."""
    try:
        held = memoryview(patch.detach().numpy() if hasattr(patch, "detach") else patch)
        if held.itemsize == 1:
            return held.cast("B") if held.nbytes else memoryview(b"")
    except (TypeError, RuntimeError):
        pass
    raise UnsupportedError(
        f"patch must be bytes, or hold contiguous bytes in host memory, got {type(patch).__name__}: pass what "
        "make_patch returned, or read_bytes() of a file"
    )


# ------------------------------------------------------------------ a new version


def require_base(
    version: Version, held: Mapping[str, Held] | None, known: Mapping[str, list[int]] | None = None
) -> None:
    """Raise MismatchError unless a version can be made from a base; None: the receiver has none.

    `known`: checksums of its tensors, see `Snapshot.of`.
    """
    if version.is_whole:
        return
    if held is None:
        raise MismatchError("the patch holds changes, and there is no version to apply them to: ask for a whole one")
    # With several publishers, each patch names what its rank held of the base. Digests of frames check what changes.
    [contents, *others] = version.contents
    if others or (found := identity_of(held, known)) == contents.base:
        return
    raise MismatchError(
        f"the patch is for version {contents.base:08x}, and this is version {found:08x}: ask for a patch for "
        f"version {found:08x}, or for a whole version. Weights that were changed in place are another version"
    )


def require_no_base(patch: bytes | Sequence[bytes], key: bytes | None, why: str) -> None:
    """Raise MismatchError, which says why, unless patches hold a whole version."""
    if not read_patches(patch, key).is_whole:
        raise MismatchError(f"{why}, and the patch holds changes: ask for a whole version")


def require_versions(version: Version, held: Sequence[int]) -> None:
    """Raise MismatchError unless the patches are for the version with these identities, one for each rank."""
    wanted = [each.base for each in version.contents]
    fits = len(wanted) == len(held) and all(base in (None, own) for base, own in zip(wanted, held))
    if not fits and not version.is_whole:
        raise MismatchError(
            f"the patches are for versions {_hexadecimal(wanted)} of their ranks, and the weights are versions "
            f"{_hexadecimal(held)}: apply the patches in between, or those of a whole version"
        )


def _hexadecimal(versions: Sequence[int | None]) -> str:
    named = ["none" if each is None else f"{each:08x}" for each in versions[:8]]
    return ", ".join([*named, "..."] if len(versions) > 8 else named)


def make_version(
    version: Version,
    base: Mapping[str, _Made],
    held: Mapping[str, Held],
    new: Callable[[str, Form], tuple[_Made, Held]],
) -> dict[str, _Made]:
    """`assemble` from the right base. Raises FrameError and MismatchError."""
    # A frame of the base is read for its checksum when it is decoded, and stays in the cache for that.
    try:
        made, digests = assemble(version, base, held, new)
    except (FrameError, MismatchError):
        require_base(version, held)  # then this is why
        raise
    require_base(version, held, digests)
    return made


def assemble(
    version: Version,
    base: Mapping[str, _Made],
    held: Mapping[str, Held],
    new: Callable[[str, Form], tuple[_Made, Held]],
) -> tuple[dict[str, _Made], dict[str, list[int]]]:
    """Make all tensors of a version, in the order of the base. Whether it is the right base is not known yet.

    Args:
        base: the tensors of the base, in the form of the result.
        held: the same tensors.
        new: makes a tensor of a form, not filled.

    Returns: the tensors, and the checksums of those of the base that were read, see `Snapshot.of`.
    """
    gone = base.keys() if version.is_whole else version.gone
    kept = {name: each for name, each in base.items() if name not in gone}
    made = dict(kept)
    pieces = []
    for name, sources in version.parts.items():
        if name in version.same_as:
            continue
        older = held.get(name) if name in kept else None
        _require_covered(name, sources, older)
        made[name], target = new(name, sources[0].form)
        has_base = older is not None and older.form == sources[0].form
        if has_base and _covered(sources) < target.box.numel:
            copy(older.data, target.data)
        pieces += pieces_of(version, name, older if has_base else target, into=target)
    digests: dict[str, list[int]] = {}
    for piece, digest in zip(pieces, in_order(_write, pieces, elements_of), strict=True):
        if digest is not None:
            digests.setdefault(piece.name, []).append(digest)
    for name, other in version.same_as.items():
        made[name] = made[other]
    return made, digests


def values_of(
    version: Version, names: Iterable[str], base: Mapping[str, Held], made: Mapping[str, Held]
) -> Iterator[np.ndarray]:
    """The elements of tensors of a version, rows: one tensor after the other, up to a frame at a time.

    Takes a few frames of memory for each thread, besides the tensors of `base` and `made`. Those are asked for one at a
    time, and held until their last frame was taken. Raises FrameError and MismatchError.

    Args:
        base: tensors of the base.
        made: tensors of the version. Asked for those that are the base's, or of which ranks published parts.
    """
    return in_order(_value, _steps(version, names, base, made), elements_of)


def _steps(
    version: Version, names: Iterable[str], base: Mapping[str, Held], made: Mapping[str, Held]
) -> Iterator[Piece]:
    """The frames of tensors, to decode or to take from tensors that are there."""
    for name in names:
        sources = version.parts.get(name, [])
        # Frames of a part lie one behind the other in the part alone.
        is_one = len(sources) == 1 and sources[0].box == Box.whole(sources[0].form.sizes)
        if not is_one:
            held = made[name]
            yield from (Piece(name, None, box, b"", 0, held, box) for box in frames_of(held.box))
            continue
        form, box = sources[0].form, sources[0].box
        older = base[name] if name in base and not version.is_whole else None
        _require_covered(name, sources, older)
        if older is None or older.form != form:  # no frame looks at it
            older = Held(form, box, np.empty(0))
        yield from pieces_of(version, name, older)


def _value(piece: Piece) -> np.ndarray:
    return decode(piece) if piece.frame else piece.target.on_host(piece.box)


def _covered(sources: list[Source]) -> int:
    """How many elements the parts have, which don't overlap."""
    return sum(source.box.numel for source in sources)


def _require_covered(name: str, sources: list[Source], older: Held | None) -> None:
    """Raise MismatchError unless parts and the base hold all elements of a tensor."""
    form = sources[0].form
    if older is not None and older.form == form:
        return
    covered, most = _covered(sources), Box.whole(form.sizes).numel
    if covered < most or any(source.from_base for source in sources):
        raise MismatchError(
            f"{name}: the patch has {covered} of its {most} elements or changes them, and the base has no such tensor "
            f"of {form.dtype} {list(form.shape)}"
        )


# ------------------------------------------------------------------ frames


class Piece(NamedTuple):
    """A frame, and the tensor that it changes.

    Attributes:
        name, source: of the tensor. `source` None: no patch has the frame.
        box: the frame's elements.
        frame: its bytes; none: the elements are those of the base.
        digest: checksum of the new elements.
        target: what is here of the tensor, its values those of the base.
        overlap: the frame's elements that are here.
        into: the new tensor; None: the target.
    """

    name: str
    source: Source | None
    box: Box
    frame: memoryview | bytes
    digest: int
    target: Held
    overlap: Box
    into: Held | None = None

    @property
    def view(self) -> Array:
        """The elements to write."""
        into = self.target if self.into is None else self.into
        return self.overlap.of(into.data, into.box.offsets)


def elements_of(piece: Piece) -> int:
    return piece.box.numel


def pieces(version: Version, targets: Mapping[str, Held]) -> list[Piece]:
    """What a version changes in tensors."""
    return [piece for name, target in targets.items() for piece in pieces_of(version, name, target) if piece.frame]


def pieces_of(version: Version, name: str, target: Held, into: Held | None = None) -> Iterator[Piece]:
    """The frames that lie in a tensor, also empty ones."""
    for source in version.parts[name]:
        is_alike = source.box == target.box
        if not is_alike and source.box.overlap(target.box) is None:
            continue
        for box, frame, digest in zip(frames_of(source.box), source.frames, source.digests):
            overlap = box if is_alike else box.overlap(target.box)
            if overlap is not None:
                yield Piece(name, source, box, frame, digest, target, overlap, into)


def _write(piece: Piece) -> int | None:
    """Write a frame's elements into the new tensor. Raises FrameError and MismatchError.

    Returns the checksum of the same frame of the base; None if it was not read, or is cut into other frames.
    """
    view, source, target = piece.view, piece.source, piece.target
    is_cut_alike = source.from_base and target is not piece.into and target.box == source.box
    digests = np.empty(2, np.uint32)
    if not piece.frame:
        copy(piece.overlap.of(target.data, target.box.offsets), view)
        return digest_of(kernels.cpu_backend(), target.on_host(piece.box)) if is_cut_alike else None
    # Decode to where the elements belong, if they lie side by side there.
    is_row = isinstance(view, np.ndarray) and view.flags.c_contiguous and piece.overlap == piece.box
    if is_row and source.elements == source.form.coded:
        decode(piece, view.reshape(-1).view(numpy_dtype(source.elements)), digests)
    else:
        copy(new_values_of(piece, digests), view)
    return int(digests[0]) if is_cut_alike else None


def new_values_of(piece: Piece, digests: np.ndarray | None = None) -> Array:
    """The new values of a piece's overlap, as integers. Arguments and errors as of `decode`."""
    return piece.overlap.of(shaped(bits_of(decode(piece, digests=digests)), piece.box.sizes), piece.box.offsets)


def changes_in(piece: Piece) -> Array | Changed:
    """What is to be written into a piece's `view`. Errors as of `decode`."""
    values = new_values_of(piece)
    # What needs no base is written over whatever is there by then, such as another version that was staged before.
    return changes_of(values, piece.view) if piece.source.from_base else values


def decode(piece: Piece, out: np.ndarray | None = None, digests: np.ndarray | None = None) -> np.ndarray:
    """Decode a frame, into `out` if given. Returns the row of its elements, of which those of the overlap are right.

    `digests`: room for the checksums of the frame's elements in the base, if all are here, and of the new ones.

    Raises FrameError and MismatchError.
    """
    name, source, box, frame, digest, target, overlap, _ = piece
    backend = kernels.cpu_backend()
    x = np.empty(box.numel, numpy_dtype(source.elements)) if out is None else out
    digests = np.empty(2, np.uint32) if digests is None else digests
    has_base = source.from_base and overlap == box
    if has_base:
        before = target.on_host(box)
        base_x = converted(before, source.elements)
    else:
        # The base of elements that this receiver lacks is 0. What they come to is wrong, and is not used.
        base_x = x
        bits_of(x).fill(0)
        if source.from_base:
            known = bits_of(converted(target.on_host(overlap), source.elements))
            copy(shaped(known, overlap.sizes), overlap.of(shaped(bits_of(x), box.sizes), box.offsets))
    is_plain = len(frame) == x.nbytes
    try:
        data = np.frombuffer(frame, np.uint8)
        if is_plain:
            x.view(np.uint8)[:] = data
        else:
            update = _unpacked(data, max_update_bytes(box.numel, x.itemsize))
            require_seals([update])
            decode_update(backend, update, base_x, x, digests)
    except DamagedFrame as damage:
        raise FrameError(f"{name}: a frame is damaged: {damage}; get the patch again") from damage
    # Checksums are those of the tensor's own dtype.
    if is_plain or source.elements != source.form.coded:
        x = converted(x, source.form.coded)
        digests[:] = digest_of(backend, before) if has_base else 0, digest_of(backend, x)
    # The digest is that of all elements of the frame.
    if (is_plain or not source.from_base or overlap == box) and digests[1] != digest:
        if source.from_base and not is_plain:
            raise MismatchError(
                f"{name}: its values are not those of the version that the patch is for: ask for a whole version"
            )
        raise FrameError(f"{name}: a frame does not have the checksum that the patch says; get the patch again")
    return x


def _unpacked(frame: np.ndarray, max_bytes: int) -> np.ndarray:
    """The update in a frame, which zlib may have packed. Raises DamagedFrame if it has more than `max_bytes`."""
    if frame[0] != _ZLIB:
        return frame
    unpacking = zlib.decompressobj()
    try:
        update = unpacking.decompress(frame, max_bytes + 1)
    except zlib.error as error:
        raise DamagedFrame(str(error)) from None
    if not unpacking.eof or unpacking.unused_data or not update:
        raise DamagedFrame("what zlib packed is cut off, or too long")
    return np.frombuffer(update, np.uint8)
