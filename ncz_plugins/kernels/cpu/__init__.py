"""The compiled kernels for host tensors: one C++ library, loaded by ctypes, that every Python version shares.

`setup.py` builds `libncz_cpu.so` into this folder. ctypes releases the GIL during each call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..backend import Backend
from ..format import DTYPES, HEADER, HEADER_BYTES, MAGIC, VERSION, DamagedFrame, chunks_of

LIBRARY = Path(__file__).with_name("libncz_cpu.so")
ABI_VERSION = 1  # ncz::ABI_VERSION in format.h

_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS = {  # name: (result, arguments), as at the end of codec.h
    "chunk_statistics": (None, (_POINTER, _INT32, _INT64, _POINTER, _POINTER)),
    "quantize": (None, (_POINTER, _INT32, _POINTER, _INT64, _POINTER)),
    "dequantize": (None, (_POINTER, _POINTER, _INT64, _POINTER, _INT32)),
    "encode_codes": (_INT64, (_POINTER, _INT64, _INT32, _INT32, _POINTER)),
    "decode_codes": (_INT64, (_POINTER, _INT64, _INT64, _POINTER, _INT32)),
    "encode": (_INT64, (_POINTER, _INT32, _POINTER, _INT64, _INT32, _INT32, _POINTER)),
    "decode": (_INT64, (_POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT32)),
    "reduce": (_INT64, (_POINTER, _INT64, _POINTER, _INT32, _POINTER, _INT64, _INT32, _INT32, _POINTER)),
}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}

_HEADER_FIELDS = "magic version coder predictor width stored payload_bytes flags checksum".split()
_DAMAGE = {  # ncz::Damage in format.h: what the reference says, in its words
    1: f"{{bytes}} bytes are too few for a frame header of {HEADER_BYTES}",
    2: f"magic is {{magic:#010x}}, not {MAGIC:#010x}: not a frame",
    3: f"frame version is {{version}}; this build reads version {VERSION}",
    4: "reserved header fields are {flags:#x} and {checksum:#x}, not 0",
    5: "predictor {predictor} is unknown",
    6: "frame holds {stored} codes, expected {count}",
    7: "payload has {payload} bytes, the header says {payload_bytes}",
    8: "RAW payload has {payload} bytes for {count} symbols of {width} bits",
    9: "coder {coder} with width {width} is unknown",
    10: "FIXED payload has {payload} bytes, fewer than its table of {table}",
    11: "chunk sizes add up to {value} bytes, the payload holds {chunk_bytes}",
    12: "FIXED chunk has a width over 32 or too few width bytes",
    13: "FIXED chunk has {value} bytes, its widths ask for another number",
}


class CpuBackend(Backend):
    """The C++ kernels compiled for one instruction set: "avx2" or "portable".

    Raises ImportError if the library isn't built, is of another version, or can't run on this CPU.
    """

    def __init__(self, instruction_set: str):
        library = _library()
        if instruction_set == "avx2" and (missing := library.ncz_avx2_missing()):
            raise ImportError(f"{missing.decode()}; NCZ_CPU_KERNELS=portable runs here")
        self.name = instruction_set
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"ncz_{name}_{instruction_set}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)

    def chunk_statistics(self, x):
        absmax, squares = torch.empty(2, chunks_of(x.numel()), dtype=torch.float64)
        self._chunk_statistics(x.data_ptr(), _DTYPE[x.dtype], x.numel(), absmax.data_ptr(), squares.data_ptr())
        return absmax, squares

    def quantize(self, x, inverse_steps, codes):
        self._quantize(x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), x.numel(), codes.data_ptr())

    def dequantize(self, codes, scales, out):
        self._dequantize(codes.data_ptr(), scales.data_ptr(), out.numel(), out.data_ptr(), _DTYPE[out.dtype])

    def encode_codes(self, codes, coder, predictor, frame):
        return self._encode_codes(codes.data_ptr(), codes.numel(), coder, predictor, frame.data_ptr())

    def decode_codes(self, frame, codes, add=False):
        count = codes.numel()
        _check(self._decode_codes(frame.data_ptr(), frame.numel(), count, codes.data_ptr(), add), frame, count)

    def encode(self, x, inverse_steps, coder, predictor, frame):
        return self._encode(
            x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), x.numel(), coder, predictor, frame.data_ptr()
        )

    def decode(self, frame, scales, out):
        count, dtype = out.numel(), _DTYPE[out.dtype]
        done = self._decode(frame.data_ptr(), frame.numel(), scales.data_ptr(), count, out.data_ptr(), dtype)
        _check(done, frame, count)

    def reduce(self, frame, x, inverse_steps, coder, predictor, out):
        count, dtype = x.numel(), _DTYPE[x.dtype]
        own = x.data_ptr(), dtype, inverse_steps.data_ptr(), count
        written = self._reduce(frame.data_ptr(), frame.numel(), *own, coder, predictor, out.data_ptr())
        return _check(written, frame, count)


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(f"{LIBRARY.name} is not built: reinstall ncz_plugins where a C++17 compiler is on the PATH")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version = library.ncz_abi_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"{LIBRARY} does not load: {error}; reinstall ncz_plugins") from error
    if version != ABI_VERSION:
        raise ImportError(f"{LIBRARY} has ABI version {version}, expected {ABI_VERSION}: reinstall ncz_plugins")
    library.ncz_avx2_missing.restype = ctypes.c_char_p
    return library


def _check(result: int, frame: Tensor, count: int) -> int:
    """`result` of a function that reads `frame`, unless it says that the frame is damaged."""
    if result >= 0:
        return result
    value, cause = divmod(-result, 256)
    header = frame[:HEADER_BYTES].numpy().tobytes().ljust(HEADER_BYTES, b"\0")
    facts = dict(zip(_HEADER_FIELDS, HEADER.unpack(header)), value=value, count=count, bytes=frame.numel())
    facts["payload"] = frame.numel() - HEADER_BYTES
    facts["table"] = 2 * chunks_of(count)
    facts["chunk_bytes"] = facts["payload"] - facts["table"]
    raise DamagedFrame(_DAMAGE[cause].format(**facts))
