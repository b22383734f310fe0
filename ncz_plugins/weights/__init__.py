"""Versions of a model's weights as patches: bytes that turn one version into the next, exactly.

- `patch.py`: what a patch is, and how it is made and applied.
- `index.py`: the head of a patch and the list of its tensors, checked before anything is decoded.
- `items.py`: tensors as bytes, and the names of their dtypes.
- `files.py`: safetensors files, and patches between them.
- `sync.py`: a trainer that publishes versions, and workers that follow.

Patches code and decode frames themselves, so this package imports `ncz_plugins.kernels` as well as `ncz_plugins.core`.
"""

from __future__ import annotations

from .patch import apply_patch, make_patch
from .sync import WeightPublisher, WeightSubscriber, WeightSync

__all__ = ["WeightPublisher", "WeightSubscriber", "WeightSync", "apply_patch", "make_patch"]
