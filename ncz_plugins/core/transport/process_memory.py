"""Tensors straight out of the memory of another process of this machine, by process_vm_readv(2).

One copy, by the reader, where a socket takes two and the kernel's bookkeeping: several times as fast. Linux allows it
among processes of one user unless it was told not to (kernel.yama.ptrace_scope above 0, some containers), so whether
it works must be tried.
"""

from __future__ import annotations

import ctypes
import functools
import os

from torch import Tensor


class _Span(ctypes.Structure):
    """struct iovec of readv(2)."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def read(process: int, address: int, into: Tensor) -> None:
    """Fill a contiguous host tensor with what `process` has at `address`.

    Raises OSError if the process is gone, does not have as much memory there, or may not be read.
    """
    done = 0
    while done < into.nbytes:  # Linux moves at most 2 GiB at once
        here, there = (_Span(start + done, into.nbytes - done) for start in (into.data_ptr(), address))
        moved = _function()(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {process}: {os.strerror(code)}")
        done += moved


@functools.cache
def _function():
    """process_vm_readv of the C library. Raises OSError where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError("this system has no process_vm_readv") from error
    function.argtypes = [ctypes.c_int, *[ctypes.POINTER(_Span), ctypes.c_ulong] * 2, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function
