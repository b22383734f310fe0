"""Plugin for Horovod: `hvd.DistributedOptimizer(optimizer, compression=NCZ)` compresses gradients.

`NCZ` alone means all defaults, or the file named in NCZ_CONFIG. `NCZ("ncclz.yaml")`, `NCZ({...})` and
`NCZ(quantizer={"value": 0.1})` have their own settings. `allreduce`, `allreduce_async` and `grouped_allreduce` compress
single tensors, with Horovod's signatures.

    patches.py      replacements of Horovod's functions
    compressor.py   NCZ, and the form of it that an optimizer holds
    functions.py    allreduce and its relatives for single tensors
    pending.py      tensors that wait for their reduction, and their handles
    reduction.py    registry of handles, and the end of a step
    bucket_plan.py  which gradients are reduced together, and when
    process_set.py  reduction of buckets over one process set, on its thread
    fusion.py       several tensors in one call
    transport.py    frames and plain collectives over Horovod's operations
    connections.py  our own connections, for the schedules ring and halving and for GPUs
    gpu_streams.py  CUDA streams beside the program's
    gathering.py    exchange of small values other than tensors
    elastic.py      an NCZ in hvd.elastic.TorchState
    tuning.py       what `ncz tune` measures under Horovod
"""

from __future__ import annotations

try:
    import horovod.torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ncz_plugins.horovod needs Horovod with PyTorch, which pip can't compile for today's torch: run "
        "tools/horovod_wheel.py of the repository with this Python"
    ) from error

from . import patches
from .compressor import NCZ
from .functions import allreduce, allreduce_async, grouped_allreduce, grouped_allreduce_async

patches.install()

__all__ = ["NCZ", "allreduce", "allreduce_async", "grouped_allreduce", "grouped_allreduce_async"]
