"""Compressed gradients under DeepSpeed: `import ncz_plugins.deepspeed` before `deepspeed.initialize`.

The key "communication_compression" in the DeepSpeed configuration then switches compression on: "ncclz" for all
defaults, a mapping of settings, or the path of a file. Without the key nothing changes.
`engine.communication_compression` is the engine's `GradientCompression`, with its `stats`, or None without the key.
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
