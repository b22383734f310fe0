"""Kernels that quantize, choose a coder and code.

All backends compute the same codes; GPUs have coders of their own.

This package imports nothing of `ncz_plugins.core`.

    backend.py    interface of all backends, with shapes and dtypes
    format.py     constants and types of frames and kernels, as common/format.h has them for C++
    reference/    numpy backend: the executable specification
    cpu/          C++ backend for host tensors
    cuda/         CUDA backend for tensors on GPUs
    common/       C++ headers that cpu/ and cuda/ share
    lossless.py   lossless frames of floats and of byte changes (SPLIT)
    sparse.py     frames of rare changes (SPARSE)
    updates.py    lossless frames of elements of which the receiver has an older version
    ieee.py       numpy functions without numpy's warnings
    damage.py     messages for the error codes of compiled kernels
    arrays.py     torch tensors and numpy arrays, for code that takes both
    addresses.py  checked addresses of both for compiled kernels
    scratch.py    working memory that each thread reuses
    cache.py      the user's private cache folder
"""

from __future__ import annotations

import functools
import os
import warnings

from .backend import GpuBackend, HostBackend

ENVIRONMENT = "NCZ_CPU_KERNELS"  # auto (default) | avx2 | portable | reference
_CHOICES = ("avx2", "portable", "reference")


def load(name: str) -> HostBackend:
    """The CPU backend of this name: avx2, portable or reference. Raises ImportError if it can't run here."""
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend()
    if name in _CHOICES:
        from .cpu import CpuBackend

        return CpuBackend(name)
    raise ImportError(f"{ENVIRONMENT}={name!r} is unknown; allowed: auto, {', '.join(_CHOICES)}")


def statuses() -> dict[str, str]:
    """ "ok" for each CPU backend, or the reason why it does not load here. Fastest first."""
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
    """The backend for tensors on CUDA devices.

    Raises ImportError with the reason why there is none, and what to install.
    """
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
    """Either "ok" or the reason why there are no kernels for CUDA devices here."""
    try:
        cuda_backend()
    except ImportError as error:
        return str(error)
    return "ok"


@functools.cache
def cpu_backend() -> HostBackend:
    """The fastest backend for host tensors on this machine, or the one named in NCZ_CPU_KERNELS.

    Raises ImportError if the named backend is unknown or can't run here.
    """
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

    if LIBRARY.exists():  # otherwise importing ncz_plugins has warned already
        warnings.warn(
            "ncz_plugins: no compiled CPU kernels load; using the numpy reference (about 100 times slower). "
            + "; ".join(reasons),
            RuntimeWarning,
            stacklevel=2,
        )
    return load("reference")
