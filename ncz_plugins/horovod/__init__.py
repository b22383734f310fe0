"""Compressed gradients under Horovod: `hvd.DistributedOptimizer(optimizer, compression=NCZ)`.

`NCZ` alone means all defaults (or the file named in NCZ_CONFIG); `NCZ("ncclz.yaml")`, `NCZ({...})` and
`NCZ(quantizer={"value": 0.1})` carry their own settings. `allreduce`, `allreduce_async` and `grouped_allreduce` do the
same for single tensors, with Horovod's signatures.
"""

from __future__ import annotations

try:
    import horovod.torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ncz_plugins.horovod needs Horovod with PyTorch: pip install 'ncz_plugins[horovod]', which compiles it "
        "(tools/horovod_wheel.py of the repository shows how)"
    ) from error

from . import patches
from .compressor import NCZ
from .functions import allreduce, allreduce_async, grouped_allreduce, grouped_allreduce_async

patches.install()

__all__ = ["NCZ", "allreduce", "allreduce_async", "grouped_allreduce", "grouped_allreduce_async"]
