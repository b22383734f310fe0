"""The weights that an engine loaded last, in host memory, in the names and shapes of its checkpoint.

Engines fuse tensors (q, k and v; gate and up), shard and quantize them. So patches can't be written into an engine's
own tensors: they change this copy, and the engine's loader takes the tensors from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ...core.errors import MismatchError, PartlyAppliedError, UnsupportedError
from ..apply import read_patches, require_base
from ..state_dicts import apply_patch, stage_patch
from ..tensors import held_in


class CheckpointCopy:
    """Whole tensors in host memory that follow a trainer.

    Args:
        weights: the version that the trainer begins with, see `read_checkpoint`. None: its first version is whole.
        key: of the publisher, see `apply_patch`.

    Attributes:
        weights: tensors by name; empty before the first version.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None, key: bytes | None = None):
        self.weights = dict(weights or {})
        self._key = key
        self._versions: tuple[int, ...] | None = None  # identities of the version; None: not known

    @property
    def identity(self) -> int | None:
        """The identity of the version, if one rank published it. None: not known."""
        return self._versions[0] if self._versions is not None and len(self._versions) == 1 else None

    def apply(self, patches: Sequence[bytes]) -> None:
        """Apply the patches of all ranks that published a version.

        Changes are checked first, and then written in place. A whole version takes new memory.

        Raises PatchKeyError if a patch has another key, FrameError if it is damaged, and MismatchError if it is for
        another version than this one. Nothing has changed then: a whole version helps. Raises PartlyAppliedError if
        writing fails; then only a whole version is taken.
        """
        version = read_patches(patches, self._key)
        if version.is_whole:
            self.weights = apply_patch(patches, key=self._key)
            self._versions = tuple(each.version for each in version.contents)
            return
        unknown = sorted(version.parts.keys() - self.weights.keys())
        if unknown or not self.weights:
            raise MismatchError(
                f"the patches change {unknown[0] if unknown else 'a version'}, and this engine has "
                f"{len(self.weights)} other tensors: send a whole version, WeightPublisher.patch()"
            )
        if self._versions is None:  # tensors that did not change must be the trainer's, too
            require_base(version, held_in(self.weights, "weights"))
        staged = stage_patch(patches, self.weights, versions=self._versions, key=self._key)
        try:
            staged.apply()
        except PartlyAppliedError:
            self.weights, self._versions = {}, None
            raise
        self._versions = staged.versions


def read_checkpoint(folder: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, in memory of their own: the files may be replaced."""
    from safetensors.torch import load_file  # every engine needs it, and this package does not

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UnsupportedError(f"{folder} has no *.safetensors: name the folder of a Hugging Face checkpoint")
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
