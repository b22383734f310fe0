"""Versions of a model's weights as patches: bytes that turn one version into the next, exactly.

- `boxes.py`: parts of tensors, and how they are cut into frames.
- `tensors.py`: what a rank holds of each tensor of a state dict, and the names of dtypes.
- `index.py`: the head of a patch and the list of its tensors, checked before anything is decoded.
- `keys.py`: keyed checksums of patches.
- `threads.py`: work on frames in threads.
- `make.py`: makes a patch of what a rank holds.
- `apply.py`: reads the patches of all ranks; makes a new version, or writes it into existing tensors.
- `files.py`: safetensors files, and patches between them.
- `manifest.py`: what a version in a folder consists of, checked.
- `directory.py`: folders of versions of checkpoints, which any tool can sync.
- `sync.py`: a trainer that publishes versions, and workers that follow.
- `engines`: doors for inference engines.

Patches code and decode frames themselves, so this package imports `ncz_plugins.kernels` as well as `ncz_plugins.core`.
"""

from __future__ import annotations

from .apply import StagedPatch, apply_patch, stage_patch
from .directory import fetch_version, publish_version, verify_versions
from .make import make_patch
from .sync import WeightPublisher, WeightSubscriber, WeightSync
from .tensors import TensorPart

__all__ = [
    "TensorPart",
    "StagedPatch",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightSync",
    "apply_patch",
    "fetch_version",
    "make_patch",
    "publish_version",
    "stage_patch",
    "verify_versions",
]
