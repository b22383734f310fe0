"""Plugin for DeepSpeed that compresses gradients: `import ncz_plugins.deepspeed` before `deepspeed.initialize`.

The key "communication_compression" in the DeepSpeed configuration switches compression on: "ncclz" for all defaults, a
mapping of settings, or the path of a file. Without the key nothing changes. `engine.communication_compression` is the
engine's `GradientCompression`, with its `stats`; None without the key.

    patches.py           list of everything that is replaced in DeepSpeed, and of its private names
    engine.py            replacements for the life of an engine: start, step, save, load, destroy
    gradients.py         replacements that compress gradient reductions
    weights.py           replacements that compress gathered weights, without loss
    exchanges.py         replacements that compress exchanged activations, if `roles` has "activation"
    compression.py       GradientCompression, and what a DeepSpeed configuration may ask for
    parameter_slices.py  which parameters the reduced gradients belong to, and of which a model holds several copies
    checkpoint.py        state of compression in DeepSpeed's checkpoints
    launch.py            launcher of training scripts that don't import the plugin
"""

from __future__ import annotations

try:
    import deepspeed  # noqa: F401
except ImportError as error:
    raise ImportError("ncz_plugins.deepspeed needs DeepSpeed: pip install 'ncz_plugins[deepspeed]'") from error

from . import patches
from .compression import GradientCompression

patches.install()

__all__ = ["GradientCompression"]
