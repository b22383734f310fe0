"""A loader of SGLang that takes patches: `--custom-weight-loader ncz_plugins.weights.engines.sglang.load_patches`.

Each rank keeps the checkpoint in host memory. A patch changes it, and then SGLang's model loads all tensors from there,
so that names, fused tensors and shards of tensor parallelism are SGLang's. See docs/guides/rl.md.
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..keys import read_key
from .checkpoint import CheckpointCopy

_KEY_FILE = "NCZ_KEY_FILE"  # a loader of SGLang has no settings

_checkpoints: WeakKeyDictionary[nn.Module, CheckpointCopy] = WeakKeyDictionary()


def load_patches(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Bring a model to a new version. SGLang calls this for `update_weights_from_tensor` with our `load_format`.

    Args:
        model: what SGLang generates with.
        named_tensors: the patches of all ranks that published the version, as rows of bytes (uint8). Their names are
            not used.

    The file that NCZ_KEY_FILE names, if it is set, has the trainer's key.

    Raises UnsupportedError if that file can't be read, and PatchKeyError, FrameError and MismatchError as
    `CheckpointCopy.apply` does. The model has not changed then.
    """
    if model not in _checkpoints:
        _checkpoints[model] = CheckpointCopy(key=read_key(os.environ.get(_KEY_FILE), _KEY_FILE))
    checkpoint = _checkpoints[model]
    checkpoint.apply([patch.cpu() for _, patch in named_tensors])
    model.load_weights(checkpoint.weights.items())
