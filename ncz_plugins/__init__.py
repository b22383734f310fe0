"""Compressed collectives for DeepSpeed, Horovod and PyTorch, with an error bound you choose.

    import ncz_plugins
    communicator = ncz_plugins.Communicator(ncz_plugins.Config.load("ncclz"))
    communicator.all_reduce(tensor)

    data = ncz_plugins.compress(tensor, {"quantizer": {"mode": "range", "value": 1e-3}})
    tensor = ncz_plugins.decompress(data)

Importing this package takes no other package. What a name needs, such as torch, is imported when it is first used.

core/        one collective call: settings, schedules, connections, and the Communicator
kernels/     quantizing and coding, on CPUs and GPUs
torch/       DDP, FSDP2, torchft, and the backend "ncz"
deepspeed/   the key in DeepSpeed's JSON
horovod/     compression=NCZ
weights/     versions of a state dict, sent as exact changes
cli/         the command ncz
__main__.py  `python -m ncz_plugins`, the same command
version.py   the version of this package
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.errors import (
    AccuracyError,
    BoundError,
    ConfigError,
    FrameError,
    MismatchError,
    NczError,
    OutOfMemoryError,
    PartlyAppliedError,
    PatchKeyError,
    PeerError,
    UnsupportedError,
)
from .version import __version__

if TYPE_CHECKING:
    from .core.codec.container import compress, decompress
    from .core.communicator import Communicator
    from .core.config import Config
    from .core.runtime.trace import recording
    from .core.training.baseline import Baseline
    from .core.training.metrics import scalars
    from .core.training.policy import ParameterSlice
    from .core.training.state import Training
    from .weights.folders.fetch import fetch_version
    from .weights.folders.publish import publish_version
    from .weights.folders.verify import verify_versions
    from .weights.state_dicts import StagedPatch, apply_patch, make_patch, stage_patch
    from .weights.sync import WeightPublisher, WeightSubscriber, WeightSync
    from .weights.tensors import TensorPart

_LAZY = {
    "Baseline": ".core.training.baseline",
    "Communicator": ".core.communicator",
    "Config": ".core.config",
    "ParameterSlice": ".core.training.policy",
    "StagedPatch": ".weights.state_dicts",
    "TensorPart": ".weights.tensors",
    "Training": ".core.training.state",
    "WeightPublisher": ".weights.sync",
    "WeightSubscriber": ".weights.sync",
    "WeightSync": ".weights.sync",
    "apply_patch": ".weights.state_dicts",
    "compress": ".core.codec.container",
    "decompress": ".core.codec.container",
    "fetch_version": ".weights.folders.fetch",
    "make_patch": ".weights.state_dicts",
    "publish_version": ".weights.folders.publish",
    "recording": ".core.runtime.trace",
    "scalars": ".core.training.metrics",
    "stage_patch": ".weights.state_dicts",
    "verify_versions": ".weights.folders.verify",
}

__all__ = [
    "AccuracyError",
    "Baseline",
    "BoundError",
    "Communicator",
    "Config",
    "ConfigError",
    "FrameError",
    "MismatchError",
    "NczError",
    "OutOfMemoryError",
    "ParameterSlice",
    "PartlyAppliedError",
    "PatchKeyError",
    "PeerError",
    "StagedPatch",
    "TensorPart",
    "Training",
    "UnsupportedError",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightSync",
    "__version__",
    "apply_patch",
    "compress",
    "decompress",
    "fetch_version",
    "make_patch",
    "publish_version",
    "recording",
    "scalars",
    "stage_patch",
    "verify_versions",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == __name__:
            raise  # a part of this package is missing: no other package would help
        raise ImportError(
            f"{__name__}.{name} needs the package '{error.name}', which is not installed; "
            f"`pip install {__name__}` installs all it needs",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Pip does not show what building the package warned of.
if not Path(__file__).with_name("kernels").joinpath("cpu", "libncz_cpu.so").exists() and (
    os.environ.get("NCZ_CPU_KERNELS") != "reference"
):
    warnings.warn(
        "ncz_plugins has no compiled CPU kernels here (libncz_cpu.so), as after an install without a C++ compiler: "
        "host tensors are compressed by numpy, about 100 times slower. Install a C++17 compiler (g++ or clang++), then "
        "reinstall ncz_plugins by pip with --force-reinstall --no-cache-dir; or set NCZ_CPU_KERNELS=reference if numpy "
        "is what you want",
        RuntimeWarning,
        stacklevel=2,
    )
