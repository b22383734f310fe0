"""Patches of state dicts: made of them, applied to them, and written into tensors in place."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.errors import MismatchError, PartlyAppliedError, UnsupportedError
from .apply import (
    Piece,
    Version,
    changes_in,
    elements_of,
    make_version,
    new_values_of,
    pieces,
    read_patches,
    require_base,
    require_versions,
)
from .elements import Changed, write
from .forms import Held, are_on_host
from .make import make_patch_of
from .strict import MAX_SIZE
from .tensors import TensorPart, held_in, is_sharded, new_tensor, published_in
from .threads import in_order

if TYPE_CHECKING:
    from ..kernels.arrays import Array


def make_patch(
    new: Mapping[str, Tensor | TensorPart],
    base: Mapping[str, Tensor | TensorPart] | None = None,
    group: dist.ProcessGroup | None = None,
    key: bytes | None = None,
    number: int | None = None,
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
        key: 16 bytes or more, which readers have, too. The patch ends with a keyed checksum (HMAC-SHA256) of all of
            it, for places that others can write to.
        number: of the version, such as the training's step, 0 or more, the same on all ranks. Readers then refuse
            patches of different versions. None: whoever carries the patches must not mix them.

    Raises PatchKeyError for a key that is too short, and UnsupportedError, saying what to do, for anything but a
    mapping of names to dense tensors, for quantized tensors, and for a number out of range.
    """
    require_number(number)
    published = published_in(new, "new")
    rank, ranks = rank_among(new, group)
    older = None if base is None else published_in(base, "base")
    return make_patch_of(published, older, rank, ranks, key=key, number=number)


def require_number(number: int | None) -> None:
    """Raise UnsupportedError unless this can be the number of a version, or is None."""
    if number is not None and (type(number) is not int or not 0 <= number < MAX_SIZE):
        raise UnsupportedError(f"number must be an integer from 0 to {MAX_SIZE - 1}, such as the step, got {number!r}")


def rank_among(state: Mapping[str, Tensor | TensorPart], group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of this rank among those that publish together, and how many they are."""
    if group is None and not (is_sharded(state) and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


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
    if base is None:
        require_base(version, None)
    return make_version(version, base or {}, held, new_tensor)


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
        decoded: keep in host memory what changes, so that `apply` only writes it: places and values where few elements
            of a frame do, otherwise all values of the frame. Until then nobody else writes into `weights`, unless the
            patch holds a whole version, of which all values are kept.
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
        require_versions(version, versions)
    targets = _targets_of(version, held_in(weights, "weights", to_write=True))
    changes = pieces(version, targets)
    values = in_order(changes_in if decoded else new_values_of, changes, elements_of, are_on_host(targets))
    kept = [new for new in values if decoded]
    return StagedPatch(version, changes, kept if decoded else None)


class StagedPatch:
    """A patch that was checked against weights, see `stage_patch`.

    Attributes:
        versions: identities of the new version, one for each rank that published it.
    """

    def __init__(
        self,
        version: Version,
        pieces: list[Piece],
        values: list[Array | Changed] | None,
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
                    write(next(values), piece.view)
                    _count_change(piece.target.tensor)
        except Exception as error:
            *done, mixed = new
            raise PartlyAppliedError(done, mixed, error) from error
        self._pieces = self._values = None

    def _new_values(self) -> Iterator[Array | Changed]:
        """Of all pieces, in order."""
        if self._values is not None:
            yield from self._values
            return
        on_host = are_on_host({piece.name: piece.target for piece in self._pieces})
        yield from in_order(new_values_of, self._pieces, elements_of, on_host)


def _count_change(tensor: Tensor) -> None:
    """Have a backward pass fail that needs the old values. Tensors of inference mode have no backward pass."""
    if not tensor.is_inference():
        increment_version(tensor)


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
