"""Kernels: quantize, select a coder, and code. All backends write the same codes, GPUs by coders of their own.

`reference` (numpy) is the specification. `cpu` (C++) normally runs on host tensors, where it forms plain sums as well,
`cuda` on tensors of a GPU. The folder `common` holds the C++ headers that both include. This package imports nothing of
`ncz_plugins.core`.
"""

from __future__ import annotations

import functools
import os
import warnings

from .backend import GpuBackend, HostBackend

ENVIRONMENT = "NCZ_CPU_KERNELS"  # auto (default) | avx2 | portable | reference
_CHOICES = ("avx2", "portable", "reference")


def load(name: str) -> HostBackend:
    """The CPU backend called `name`: avx2, portable or reference. Raises ImportError if it can't run here."""
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend()
    if name in _CHOICES:
        from .cpu import CpuBackend

        return CpuBackend(name)
    raise ImportError(f"{ENVIRONMENT}={name!r} is unknown; allowed: auto, {', '.join(_CHOICES)}")


def statuses() -> dict[str, str]:
    """For each CPU backend "ok", or the reason why it does not load here. Fastest first."""
    found = {}
    for name in _CHOICES:
        try:
            load(name)
            found[name] = "ok"
        except ImportError as error:
            found[name] = str(error)
    return found


@functools.cache
def cuda_backend() -> GpuBackend:
    """The backend for tensors on CUDA devices. Raises ImportError that says why there is none, and what to install."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError(
            "torch finds no CUDA device here" if torch.version.cuda else "this torch is built without CUDA"
        )
    try:
        from .cuda.nvrtc import CupyLauncher
    except ImportError as error:
        raise ImportError(
            f'the CUDA kernels need CuPy ({error}): pip install "ncz_plugins[cuda]", or "ncz_plugins[cuda12]" for a '
            "CUDA 12 driver"
        ) from error
    from .cuda import CudaBackend

    return CudaBackend(CupyLauncher())


def cuda_status() -> str:
    """ "ok", or the reason why there are no kernels for CUDA devices here."""
    try:
        cuda_backend()
    except ImportError as error:
        return str(error)
    return "ok"


@functools.cache
def cpu_backend() -> HostBackend:
    """The fastest backend for host tensors on this machine, or the one named in NCZ_CPU_KERNELS."""
    wanted = os.environ.get(ENVIRONMENT) or "auto"
    if wanted != "auto":
        return load(wanted)
    reasons = []
    for name in ("avx2", "portable"):
        try:
            return load(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    from .cpu import LIBRARY

    if LIBRARY.exists():  # else the import of the package has said so
        warnings.warn(
            "ncz_plugins: no compiled CPU kernels load; using the numpy reference (about 100 times slower). "
            + "; ".join(reasons),
            RuntimeWarning,
            stacklevel=2,
        )
    return load("reference")
