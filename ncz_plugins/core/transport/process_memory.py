"""Read tensors from the memory of another process of this machine, by process_vm_readv(2).

The reader makes one copy. A socket takes two and the kernel's bookkeeping, and is several times slower. Linux allows
this between processes of one user unless it is configured not to (kernel.yama.ptrace_scope above 0, some containers).
So a caller must try whether it works.
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
    """Fill a contiguous host tensor with what the process with id `process` has at `address`.

    Raises OSError if the process is gone, has less memory there, or may not be read.
    """
    start, done = host_address(into, "into", into.dtype), 0
    while done < into.nbytes:  # Linux moves at most 2 GiB at once
        here, there = (_Span(memory + done, into.nbytes - done) for memory in (start, address))
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
