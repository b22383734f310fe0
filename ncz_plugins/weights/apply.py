"""Applies patches: makes a new version of state dicts, or writes it into existing tensors.

The patches of all ranks that published a version belong together (`read_patches`). A receiver may hold other parts of
the tensors than the publishers: it decodes the frames that overlap its own part, one at a time, and keeps the overlap.
Applying a patch runs no code from it and unpickles nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import kernels
from ..core.errors import FrameError, MismatchError, PartlyAppliedError, UnsupportedError
from ..kernels.backend import require_seals
from ..kernels.format import DamagedFrame
from ..kernels.lossless import INTEGERS
from ..kernels.updates import decode_update, max_update_bytes
from .boxes import Box, frames_of
from .index import Contents, FileHeader, read_head
from .keys import without_tag
from .make import digest_of, identity_of
from .tensors import Form, Held, TensorPart, are_on_host, flat, held_in, new_tensor
from .threads import in_order

_ZLIB = 0x78  # first byte of what zlib packed; that of an update is 4E
_NUMPY_DIMENSIONS = 32  # that every version of numpy takes

_Made = TypeVar("_Made", Tensor, Held)


def apply_patch(
    patch: bytes | Sequence[bytes], base: Mapping[str, Tensor] | None = None, key: bytes | None = None
) -> dict[str, Tensor]:
    """Apply a patch to `base`. Returns the new version, whole tensors in host memory; `base` stays as it is.

    A tensor that has not changed is not copied: the new version has the tensor object of `base`. Tensors that shared
    their memory at the publisher are one tensor.

    Args:
        patch: what `make_patch` returned, as bytes or any other object that holds bytes: a bytearray, a memoryview, a
            numpy array, a uint8 tensor in host memory. If several ranks published the version: the patches of all.
        base: the version that the patch was made for. Not needed for a patch that holds a whole version.
        key: of the publisher. The keyed checksum of every patch is compared before anything else is read. None: patches
            have none.

    Raises PatchKeyError if the key is not that of a patch, FrameError if a patch is damaged or is not a patch, and
    MismatchError if `base` is not the version that the patch was made for, or if the patch of a rank is missing.
    """
    version = read_patches(patch, key)
    base = None if version.is_whole else base
    held = {} if base is None else held_in(base, "base")
    for name, each in held.items():
        if not each.is_whole:
            raise UnsupportedError(
                f"{name}: base holds a part of it, and apply_patch makes whole tensors: stage_patch "
                "writes the new version into parts"
            )
    require_base(version, None if base is None else held)

    return assemble(version, base or {}, held, _new_tensor)


def _new_tensor(name: str, form: Form) -> tuple[Tensor, Held]:
    """A tensor that is not filled, and the same as frames see it."""
    tensor = new_tensor(name, form)
    return tensor, held_in({name: tensor}, "new")[name]


def stage_patch(
    patch: bytes | Sequence[bytes],
    weights: Mapping[str, Tensor | TensorPart],
    decoded: bool = False,
    versions: Sequence[int] | None = None,
    key: bytes | None = None,
) -> StagedPatch:
    """Check a patch against `weights`, so that `StagedPatch.apply` can write the new version into them.

    Every frame is decoded and compared with its checksum, and nothing is written. Beyond the patch, this takes a few
    frames of memory for each thread. `weights` may hold other parts of the tensors than the publishers, and not all
    tensors.

    Args:
        patch: see `apply_patch`.
        weights: tensors by name, in host memory or on a GPU: plain ones, DTensors, or `TensorPart`s. Their values are
            the version that the patch was made for, unless it holds a whole version.
        decoded: keep the new values in host memory. Then `apply` only copies them.
        versions: what `weights` hold: `StagedPatch.versions` of the patch that was written into them last. None: the
            caller knows that no patch was missed.
        key: see `apply_patch`.

    Without `decoded`, the bytes of the patch must stay as they are until it is applied.

    Raises PatchKeyError, FrameError and MismatchError as `apply_patch` does, and MismatchError if a tensor's dtype or
    shape is not that of the new version, or if the new version lacks it. A frame of which `weights` hold a part is
    checked for damage, but not whether its base is right.
    """
    version = read_patches(patch, key)
    if versions is not None:
        _require_versions(version, versions)
    targets = _targets_of(version, held_in(weights, "weights", to_write=True))
    pieces = _pieces(version, targets)
    values = in_order(_decode, pieces, _elements, are_on_host(targets))
    kept = [new for new in values if decoded]
    return StagedPatch(version, pieces, kept if decoded else None)


class StagedPatch:
    """A patch that was checked against weights, see `stage_patch`.

    Attributes:
        versions: identities of the new version, one for each rank that published it.
    """

    def __init__(
        self,
        version: Version,
        pieces: list[_Piece],
        values: list[Tensor] | None,
    ):
        self.versions = tuple(each.version for each in version.contents)
        self._pieces = pieces
        self._values = values  # of the pieces; None: frames are decoded again
        self._is_applied = False

    def apply(self) -> None:
        """Write the new version into the weights that were checked.

        Takes a few frames of memory for each thread. With `decoded`, nothing but copies is left to do.

        Raises PartlyAppliedError, with the names of the tensors that are new, if writing fails.
        """
        if self._is_applied:
            raise UnsupportedError("this patch was applied already: stage the next one")
        self._is_applied = True
        new: dict[str, None] = {}  # names of tensors that were written to, in order
        try:
            with closing(self._new_values()) as values:
                for piece in self._pieces:
                    new[piece.name] = None
                    _copy(next(values), piece.view)
        except Exception as error:
            *done, mixed = new
            raise PartlyAppliedError(done, mixed, error) from error
        self._pieces = self._values = None

    def _new_values(self) -> Iterator[Tensor]:
        """Of all pieces, in order."""
        if self._values is not None:
            yield from self._values
            return
        on_host = all(piece.target.data.is_cpu for piece in self._pieces)
        yield from in_order(_decode, self._pieces, _elements, on_host)


def _copy(values: Tensor, into: Tensor) -> None:
    """Copy by this thread alone. Torch would take all of its threads, and on busy cores wait for the last of them."""
    if not into.is_cpu or into.dim() > _NUMPY_DIMENSIONS:
        into.copy_(values)
        return
    bits = INTEGERS[into.itemsize]  # numpy lacks some dtypes
    np.copyto(into.view(bits).numpy(), values.view(bits).numpy())
    # A backward pass that needs the old values must fail. Tensors of inference mode have no backward pass.
    if not into.is_inference():
        increment_version(into)


# ------------------------------------------------------------------ what patches hold


class Source(NamedTuple):
    """A part of a tensor that a patch holds. `from_base`, `digests`: see `Entry`. `elements`: dtype in frames."""

    form: Form
    box: Box
    elements: torch.dtype
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
        held = memoryview(patch.detach().numpy() if isinstance(patch, Tensor) else patch)
        if held.itemsize == 1:
            return held.cast("B") if held.nbytes else memoryview(b"")
    except (TypeError, RuntimeError):
        pass
    raise UnsupportedError(
        f"patch must be bytes, or hold contiguous bytes in host memory, got {type(patch).__name__}: pass what "
        "make_patch returned, or read_bytes() of a file"
    )


# ------------------------------------------------------------------ a new version


def require_base(version: Version, held: Mapping[str, Held] | None) -> None:
    """Raise MismatchError unless a version can be made from a base; None: the receiver has none."""
    if version.is_whole:
        return
    if held is None:
        raise MismatchError("the patch holds changes, and there is no version to apply them to: ask for a whole one")
    # With several publishers, each patch names what its rank held of the base. Digests of frames check what changes.
    [contents, *others] = version.contents
    if others or (found := identity_of(held)) == contents.base:
        return
    raise MismatchError(
        f"the patch is for version {contents.base:08x}, and this is version {found:08x}: ask for a patch for "
        f"version {found:08x}, or for a whole version. Weights that were changed in place are another version"
    )


def require_no_base(patch: bytes | Sequence[bytes], key: bytes | None, why: str) -> None:
    """Raise MismatchError, which says why, unless patches hold a whole version."""
    if not read_patches(patch, key).is_whole:
        raise MismatchError(f"{why}, and the patch holds changes: ask for a whole version")


def _require_versions(version: Version, held: Sequence[int]) -> None:
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


def assemble(
    version: Version,
    base: Mapping[str, _Made],
    held: Mapping[str, Held],
    new: Callable[[str, Form], tuple[_Made, Held]],
) -> dict[str, _Made]:
    """Make all tensors of a version, in the order of the base.

    Args:
        base: the tensors of the base, in the form of the result.
        held: the same tensors.
        new: makes a tensor of a form, not filled.
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
            target.data.copy_(older.data)
        pieces += _pieces_of(version, name, older if has_base else target, into=target)
    for _ in in_order(_write, pieces, _elements):
        pass
    for name, other in version.same_as.items():
        made[name] = made[other]
    return made


def values_of(
    version: Version, names: Iterable[str], base: Mapping[str, Held], made: Mapping[str, Held]
) -> Iterator[Tensor]:
    """The elements of tensors of a version, 1-D: one tensor after the other, up to a frame at a time.

    Takes a few frames of memory for each thread, besides the tensors of `base` and `made`. Those are asked for one at a
    time, and held until their last frame was taken. Raises FrameError and MismatchError.

    Args:
        base: tensors of the base.
        made: tensors of the version. Asked for those that are the base's, or of which ranks published parts.
    """
    return in_order(_value, _steps(version, names, base, made), _elements)


def _steps(
    version: Version, names: Iterable[str], base: Mapping[str, Held], made: Mapping[str, Held]
) -> Iterator[_Piece]:
    """The frames of tensors, to decode or to take from tensors that are there."""
    for name in names:
        sources = version.parts.get(name, [])
        # Frames of a part lie one behind the other in the part alone.
        is_one = len(sources) == 1 and sources[0].box == Box.whole(sources[0].form.sizes)
        if not is_one:
            held = made[name]
            yield from (_Piece(name, None, box, b"", 0, held, box) for box in frames_of(held.box))
            continue
        form, box = sources[0].form, sources[0].box
        older = base[name] if name in base and not version.is_whole else None
        _require_covered(name, sources, older)
        if older is None or older.form != form:  # no frame looks at it
            older = Held(form, box, torch.empty((), dtype=form.coded, device="cpu").expand(form.sizes))
        yield from _pieces_of(version, name, older)


def _value(piece: _Piece) -> Tensor:
    return flat(_decode(piece)) if piece.frame else piece.target.on_host(piece.box)


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


# ------------------------------------------------------------------ existing tensors


def _targets_of(version: Version, held: dict[str, Held]) -> dict[str, Held]:
    """The tensors that a version is written into. Raises MismatchError if it does not fit them."""
    targets: dict[str, Held] = {}
    gone = version.gone
    written: dict[Hashable, str] = {}  # what each memory will hold
    for name, target in held.items():
        sources = version.parts.get(name, [])
        if name in gone or (version.is_whole and not sources):
            raise MismatchError(f"{name}: the new version has no such tensor: leave it out")
        for source in sources[:1]:
            if source.form != target.form:
                raise MismatchError(
                    f"{name}: is {source.form.dtype} {list(source.form.shape)} in the new version, and "
                    f"{target.form.dtype} {list(target.form.shape)} here: make a new tensor"
                )
        overlaps = [source.box.overlap(target.box) for source in sources]
        covered = sum(overlap.numel for overlap in overlaps if overlap is not None)
        if version.is_whole and covered < target.box.numel:
            raise MismatchError(f"{name}: the patches hold {covered} of {target.box.numel} elements that are needed")
        # Tensors that share their memory here must share it at the publishers, too. They are written once.
        content = version.same_as.get(name, name) if sources else None
        if target.memory in written:
            if written[target.memory] != content:
                raise MismatchError(f"{name}: shares its memory with another tensor here, and not in the new version")
            continue
        if target.memory is not None:
            written[target.memory] = content
        if sources:
            targets[name] = target
    return targets


class _Piece(NamedTuple):
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
    def view(self) -> Tensor:
        """The elements to write."""
        into = self.target if self.into is None else self.into
        return self.overlap.of(into.data, into.box.offsets)


def _elements(piece: _Piece) -> int:
    return piece.box.numel


def _pieces(version: Version, targets: Mapping[str, Held]) -> list[_Piece]:
    """What a version changes in tensors."""
    return [piece for name, target in targets.items() for piece in _pieces_of(version, name, target) if piece.frame]


def _pieces_of(version: Version, name: str, target: Held, into: Held | None = None) -> Iterator[_Piece]:
    """The frames that lie in a tensor, also empty ones."""
    for source in version.parts[name]:
        if source.box.overlap(target.box) is None:
            continue
        for box, frame, digest in zip(frames_of(source.box), source.frames, source.digests):
            overlap = box.overlap(target.box)
            if overlap is not None:
                yield _Piece(name, source, box, frame, digest, target, overlap, into)


def _write(piece: _Piece) -> None:
    """Write a frame's elements into the new tensor. Raises FrameError and MismatchError."""
    if not piece.frame:
        piece.view.copy_(piece.overlap.of(piece.target.data, piece.target.box.offsets))
        return
    # Decode to where the elements belong, if they lie side by side there.
    is_row = piece.view.is_contiguous() and piece.overlap == piece.box
    out = flat(piece.view) if is_row and piece.source.elements == piece.view.dtype else None
    values = _decode(piece, out)
    if out is None:
        piece.view.copy_(values)


def _decode(piece: _Piece, out: Tensor | None = None) -> Tensor:
    """Decode a frame, into `out` if given. Returns the values of the overlap. Raises FrameError and MismatchError."""
    name, source, box, frame, digest, target, overlap, _ = piece
    backend = kernels.cpu_backend()
    x = torch.empty(box.numel, dtype=source.elements, device="cpu") if out is None else out
    if source.from_base and overlap == box:
        base_x = target.on_host(box).to(source.elements)
    else:
        # The base of elements that this receiver lacks is 0. What they come to is wrong, and is not used.
        base_x = x.zero_()
        if source.from_base:
            overlap.of(x.view(box.sizes), box.offsets).copy_(overlap.of(target.data, target.box.offsets))
    is_plain = len(frame) == x.nbytes
    try:
        data = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        if is_plain:
            x.view(torch.uint8).copy_(data)
        else:
            update = _unpacked(data, max_update_bytes(box.numel, x.itemsize))
            require_seals([update])
            decode_update(backend, update, base_x, x)
    except DamagedFrame as damage:
        raise FrameError(f"{name}: a frame is damaged: {damage}; get the patch again") from damage
    x = x.to(source.form.coded)
    # The digest is that of all elements of the frame.
    if (is_plain or not source.from_base or overlap == box) and digest_of(backend, x) != digest:
        if source.from_base and not is_plain:
            raise MismatchError(
                f"{name}: its values are not those of the version that the patch is for: ask for a whole version"
            )
        raise FrameError(f"{name}: a frame does not have the checksum that the patch says; get the patch again")
    return overlap.of(x.view(box.sizes), box.offsets)


def _unpacked(frame: Tensor, max_bytes: int) -> Tensor:
    """The update in a frame, which zlib may have packed. Raises DamagedFrame if it has more than `max_bytes`."""
    if frame[0] != _ZLIB:
        return frame
    unpacking = zlib.decompressobj()
    try:
        update = unpacking.decompress(frame.numpy(), max_bytes + 1)
    except zlib.error as error:
        raise DamagedFrame(str(error)) from None
    if not unpacking.eof or unpacking.unused_data or not update:
        raise DamagedFrame("what zlib packed is cut off, or too long")
    return torch.frombuffer(bytearray(update), dtype=torch.uint8)
