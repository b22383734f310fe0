"""A loader of SGLang that takes patches: `--custom-weight-loader ncz_plugins.weights.engines.sglang.load_patches`.

Each rank keeps the checkpoint in host memory. A patch changes it, and then SGLang's model loads all tensors from there,
so that names, fused tensors and shards of tensor parallelism are SGLang's. See docs/guides/rl.md.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .checkpoint import CheckpointCopy

_checkpoints: WeakKeyDictionary[nn.Module, CheckpointCopy] = WeakKeyDictionary()


def load_patches(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Bring a model to a new version. SGLang calls this for `update_weights_from_tensor` with our `load_format`.

    Args:
        model: what SGLang generates with.
        named_tensors: the patches of all ranks that published the version, as rows of bytes (uint8). Their names are
            not used.

    Raises FrameError and MismatchError as `CheckpointCopy.apply` does. The model has not changed then.
    """
    checkpoint = _checkpoints.setdefault(model, CheckpointCopy())
    checkpoint.apply([patch.cpu() for _, patch in named_tensors])
    model.load_weights(checkpoint.weights.items())
