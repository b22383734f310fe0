"""Reads of another process's memory on this machine, by process_vm_readv(2).

Reading makes one copy. A socket makes two, and is several times slower. Linux allows reads between processes of one
user, unless kernel.yama.ptrace_scope is above 0 or a container forbids it. So a caller must try whether it works.
"""

from __future__ import annotations

import ctypes
import functools
import os

from torch import Tensor

from ...kernels.addresses import host_address


class _Span(ctypes.Structure):
    """struct iovec of readv(2)."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def read(process: int, address: int, into: Tensor) -> None:
    """Fill a contiguous tensor in host memory with bytes of another process.

    Args:
        process: process id.
        address: address of the first byte in that process.
        into: the tensor to fill.

    Raises OSError if the process is gone, has less memory there, or may not be read.
    """
    start, done = host_address(into, "into", into.dtype), 0
    while done < into.nbytes:  # Linux reads at most 2 GiB at once
        here, there = (_Span(memory + done, into.nbytes - done) for memory in (start, address))
        moved = _function()(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {process}: {os.strerror(code)}")
        done += moved


@functools.cache
def _function():
    """process_vm_readv of the C library. Raises OSError if there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError("this system has no process_vm_readv") from error
    function.argtypes = [ctypes.c_int, *[ctypes.POINTER(_Span), ctypes.c_ulong] * 2, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function
