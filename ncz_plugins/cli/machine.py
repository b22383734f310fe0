"""Facts about this machine, for `ncz info`: versions, CPU, GPUs, kernels, backends, compilers.

Any of them may be missing. DeepSpeed and Horovod are not imported, and CuPy only if there is a GPU: their versions come
from package metadata.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from ..version import __version__
from .enable import enabled

# CPU features that the kernels use or may use in future, as /proc/cpuinfo names them on x86 and Arm.
_FEATURES = ("avx2", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "asimd", "sve", "sve2")
# Package -> distributions. CuPy has one distribution for each version of CUDA.
_PACKAGES = {
    "deepspeed": ("deepspeed",),
    "horovod": ("horovod",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
}


def report() -> dict[str, Any]:
    """All facts, of JSON types only. None stands for what is missing."""
    return {
        "ncz_plugins": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu": cpu(),
        "kernels": cpu_kernels(),
        "cuda_kernels": cuda_kernels(),
        **torch_facts(),
        "packages": {name: installed_version(*names) for name, names in _PACKAGES.items()},
        "enabled": [str(file) for file in enabled()],
        "compilers": {name: compiler(name) for name in ("g++", "nvcc")},
    }


def cpu() -> dict[str, Any]:
    """Model name, cores of the machine, cores that this process may use, and features that matter to the kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    facts = {}
    for key, _, value in (line.partition(":") for line in lines):
        facts.setdefault(key.strip().lower(), value.strip())
    flags = set(facts.get("flags", facts.get("features", "")).split())
    cores = os.cpu_count()
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "features": [name for name in _FEATURES if name in flags],
    }


def cpu_kernels() -> dict[str, Any]:
    """Status of each kind of CPU kernels (loaded, or the reason why not), and the one in use."""
    from .. import kernels

    found = {"status": kernels.statuses(), "requested": os.environ.get(kernels.ENVIRONMENT, "auto")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status says it if only the reference loads
        try:
            return found | {"in_use": kernels.cpu_backend().name}
        except ImportError as error:
            return found | {"in_use": None, "error": str(error)}


def cuda_kernels() -> str:
    """ "ok", or the reason why there are no CUDA kernels."""
    from .. import kernels

    return kernels.cuda_status()


def torch_facts() -> dict[str, Any]:
    """Versions of torch and numpy, backends of torch.distributed, and GPUs that torch sees."""
    import numpy
    import torch
    import torch.distributed as dist

    backends = ("gloo", "nccl", "mpi", "ucc")
    built = {name: dist.is_available() and getattr(dist, f"is_{name}_available")() for name in backends}
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append(
                {"name": gpu.name, "compute_capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
            )
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "distributed": built,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if built["nccl"] and torch.version.cuda else None,
        "gpus": gpus,
    }


def installed_version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def compiler(command: str) -> dict[str, str] | None:
    """Path of a compiler, and the line of its --version output with the version; None if it is not installed."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"path": path, "version": f"does not run: {error}"}
    lines = [line for line in output.splitlines() if line.strip()]
    # nvcc prints its name and copyright first; the line with "release" has the version.
    version = next((line for line in lines if "release" in line), lines[0] if lines else "unknown")
    return {"path": path, "version": version.strip()}
