"""The compiled kernels for host tensors: one C++ library for all Python versions, loaded by ctypes.

`setup.py` builds `libncz_cpu.so` into this folder. ctypes releases the GIL during each call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from .. import damage
from ..backend import HostBackend, require_seals
from ..format import (
    COMBINED_DTYPES,
    DTYPES,
    HEADER_BYTES,
    Coding,
    Noise,
    Rows,
    SelectorCosts,
    StepRule,
    blocks_of,
    packed_bytes,
)
from ..scratch import Scratch

LIBRARY = Path(__file__).with_name("libncz_cpu.so")
ABI_VERSION = 7  # ncz::ABI_VERSION in common/format.h
_FRAMES_TOGETHER = 4  # FRAMES_TOGETHER in codec.h

_POINTER, _INT32, _INT64, _UINT32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_FUNCTIONS = {  # name: (result, arguments), as at the end of codec.h
    "scratch_bytes": (_INT64, (_INT64,)),
    "checksum": (_UINT32, (_POINTER, _INT64)),
    "block_statistics": (None, (_POINTER, _INT32, _INT64, _POINTER, _POINTER, _POINTER)),
    "quantize": (None, (_POINTER, _INT32, _POINTER, _INT64, _POINTER, _POINTER)),
    "dequantize": (None, (_POINTER, _POINTER, _INT64, _POINTER, _INT32)),
    "encode_codes": (_INT64, (_POINTER, _INT64, _POINTER, _POINTER, _POINTER)),
    "decode_codes": (_INT64, (_POINTER, _INT64, _INT64, _POINTER, _INT32, _POINTER)),
    "encode": (_INT64, (_POINTER, _INT32, _POINTER, _INT64, _POINTER, _POINTER, _POINTER, _POINTER)),
    "decode": (_INT64, (_POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT32, _POINTER)),
    "reduce": (
        _INT64,
        (_POINTER, _INT64, _POINTER, _INT32, _POINTER, _INT64, _POINTER, _POINTER, _POINTER, _POINTER),
    ),
    "decode_sum": (
        _INT64,
        (_POINTER, _INT64, _POINTER, _INT32, _POINTER, _POINTER, _INT64, _POINTER, _POINTER, _POINTER),
    ),
    "add_up": (
        _INT64,
        (_POINTER, _POINTER, _INT32, _POINTER, _INT32, _POINTER, _INT64, _POINTER, _POINTER, _POINTER),
    ),
    "differences": (None, (_POINTER, _POINTER, _INT32, _INT64, _POINTER)),  # these two in differences.h
    "add_differences": (None, (_POINTER, _POINTER, _INT64, _POINTER, _INT32)),
    "combine": (None, (_POINTER, _INT32, _INT32, _INT64, _INT32, _INT32, _POINTER)),  # in combine.h
    "block_magnitudes": (None, (_POINTER, _INT32, _POINTER, _POINTER)),  # from here on in fixed_rate.h
    "pack": (None, (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _POINTER, _POINTER)),
    "add_packed": (None, (_POINTER, _INT64, _INT64, _INT32, _POINTER, _INT32)),
    "unpack": (None, (_POINTER, _INT32, _POINTER, _POINTER, ctypes.c_float, _POINTER, _INT32)),
    "root_mean_squares": (None, (_POINTER, _INT32, _INT64, ctypes.c_double, _POINTER)),  # these two in scales.h
    "steps_of": (ctypes.c_double, (_POINTER, _INT64, _POINTER, _POINTER, _POINTER)),
}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
_COMBINED_DTYPE = {dtype: number for number, dtype in enumerate(COMBINED_DTYPES)}

# Measured together by `make bench`, then scaled so that AVX2's FIXED takes half a nanosecond, as on an idle core. The
# prices of RANS come from data of 0.3 and of 3 bits per value.
_COSTS = {
    "avx2": SelectorCosts(raw=680, fixed=500, huffman=1160, rans=1020, rans_rest=2280),
    "portable": SelectorCosts(raw=1090, fixed=860, huffman=1590, rans=1990, rans_rest=2420),
}


class _Coding(ctypes.Structure):  # ncz::Coding
    _fields_ = [("coder", _INT32), ("predictor", _INT32), ("costs", _INT64 * 6)]


class _Noise(ctypes.Structure):  # ncz::Noise
    _fields_ = [("key", ctypes.c_uint64), ("first", ctypes.c_uint64), ("shift", _UINT32)]


class _Rows(ctypes.Structure):  # ncz::Rows
    _fields_ = [(name, _INT64) for name in Rows._fields]


class _StepRule(ctypes.Structure):  # StepRule in scales.h
    _fields_ = [(name, ctypes.c_double) for name in StepRule._fields[1:]]


_scratch = Scratch()


class CpuBackend(HostBackend):
    """The C++ kernels compiled for one instruction set: "avx2" or "portable".

    Raises ImportError if the library isn't built, is of another version, or can't run on this CPU.
    """

    def __init__(self, instruction_set: str):
        library = _library()
        if instruction_set == "avx2" and (missing := library.ncz_avx2_missing()):
            raise ImportError(f"{missing.decode()}; NCZ_CPU_KERNELS=portable runs here")
        self.name = instruction_set
        self.costs = _COSTS[instruction_set]
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"ncz_{name}_{instruction_set}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)

    def block_statistics(self, x):
        results = torch.empty(3, blocks_of(x.numel()), dtype=torch.float64, device="cpu").unbind()
        self._block_statistics(x.data_ptr(), _DTYPE[x.dtype], x.numel(), *(each.data_ptr() for each in results))
        return results

    def quantize(self, x, inverse_steps, codes, noise=None):
        floats = x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), x.numel()
        self._quantize(*floats, codes.data_ptr(), _noise(noise))

    def dequantize(self, codes, scales, out):
        self._dequantize(codes.data_ptr(), scales.data_ptr(), out.numel(), out.data_ptr(), _DTYPE[out.dtype])

    def encode_codes(self, codes, coding, frame):
        count = codes.numel()
        return self._encode_codes(
            codes.data_ptr(), count, _coding(coding), frame.data_ptr(), self._working_memory(count)
        )

    def decode_codes(self, frame, codes, add=False):
        count, scratch = codes.numel(), self._working_memory()
        done = self._decode_codes(frame.data_ptr(), frame.numel(), count, codes.data_ptr(), add, scratch)
        _check(done, frame, count)

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        floats = x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), x.numel()
        scratch = self._working_memory(x.numel())
        return self._encode(*floats, _coding(coding), frame.data_ptr(), _noise(noise), scratch)

    def decode(self, frame, scales, out):
        count, dtype, scratch = out.numel(), _DTYPE[out.dtype], self._working_memory()
        done = self._decode(frame.data_ptr(), frame.numel(), scales.data_ptr(), count, out.data_ptr(), dtype, scratch)
        _check(done, frame, count)

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        floats = x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), x.numel()
        scratch = self._working_memory(x.numel())
        written = self._reduce(
            frame.data_ptr(), frame.numel(), *floats, _coding(coding), out.data_ptr(), _noise(noise), scratch
        )
        return _check(written, frame, x.numel())

    def decode_sum(self, sum, scales, noise=None, sealed=False):
        x, inverse_steps, out, frames, first = sum
        if len(frames) != 1 or out.dtype != x.dtype:  # half types are added to what error feedback keeps in float32
            return super().decode_sum(sum, scales, noise, sealed)
        if sealed:
            require_seals(frames)
        [frame], count = frames, x.numel()
        floats = x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), scales.data_ptr(), count, out.data_ptr()
        noise, scratch = _noise(noise and noise.from_element(first)), self._working_memory()
        _check(self._decode_sum(frame.data_ptr(), frame.numel(), *floats, noise, scratch), frame, count)

    def _added_up(self, sum, noise):
        x, inverse_steps, _, frames, first = sum
        count = x.numel()
        codes, scratch = _scratch.of("sum", count, torch.int32), self._working_memory(frames=_FRAMES_TOGETHER)
        values = x.data_ptr(), _DTYPE[x.dtype], inverse_steps.data_ptr(), count, codes.data_ptr()
        noise = _noise(noise and noise.from_element(first))
        for at in range(0, max(1, len(frames)), _FRAMES_TOGETHER):
            some = frames[at : at + _FRAMES_TOGETHER]
            pointers = (_POINTER * len(some))(*(frame.data_ptr() for frame in some))
            sizes = (_INT64 * len(some))(*(frame.numel() for frame in some))
            if self._add_up(pointers, sizes, len(some), *values, noise, scratch) < 0:
                for frame in some:
                    self.decode_codes(frame, codes)  # which says what is damaged
            values = None, *values[1:]
        return codes

    def checksum(self, frame):
        return self._checksum(frame.data_ptr(), frame.numel())

    def differences(self, x, base, codes):
        self._differences(x.data_ptr(), base.data_ptr(), _DTYPE[x.dtype], x.numel(), codes.data_ptr())

    def add_differences(self, codes, base, out):
        count, dtype = out.numel(), _DTYPE[out.dtype]
        self._add_differences(codes.data_ptr(), base.data_ptr(), count, out.data_ptr(), dtype)

    def combination(self, values, how, out, divisor=1):
        pointers = (_POINTER * len(values))(*[each.data_ptr() for each in values])
        result = _COMBINED_DTYPE[out.dtype], out.numel(), int(how), divisor, out.data_ptr()
        return functools.partial(self._combine, pointers, len(values), *result)

    def root_mean_squares(self, x, most, out):
        self._root_mean_squares(x.data_ptr(), _DTYPE[x.dtype], x.numel(), most, out.data_ptr())

    def steps_of(self, agreed, rule):
        inverse_steps, scales = torch.empty(2, agreed.numel(), dtype=torch.float32, device="cpu").unbind()
        results = inverse_steps.data_ptr(), scales.data_ptr()
        spread = self._steps_of(agreed.data_ptr(), agreed.numel(), _step_rule(rule), *results)
        return inverse_steps, scales, spread

    def block_magnitudes(self, x, rows, magnitudes):
        self._block_magnitudes(x.data_ptr(), _DTYPE[x.dtype], _rows(rows), magnitudes.data_ptr())

    def pack(self, x, rows, magnitudes, bits, packed, noise=None):
        floats = x.data_ptr(), _DTYPE[x.dtype], _rows(rows), magnitudes.data_ptr()
        self._pack(*floats, bits, _noise(noise), packed.data_ptr())

    def add_packed(self, packed, count, bits, out, out_bits):
        blocks = out.numel() // packed_bytes(out_bits)
        self._add_packed(packed.data_ptr(), count, blocks, bits, out.data_ptr(), out_bits)

    def unpack(self, packed, bits, rows, magnitudes, denominator, out):
        scales = _rows(rows), magnitudes.data_ptr(), denominator
        self._unpack(packed.data_ptr(), bits, *scales, out.data_ptr(), _DTYPE[out.dtype])

    def _working_memory(self, count: int = 0, frames: int = 1) -> int:
        """The address of the working memory for encoding `count` codes, or for decoding some frames together.

        To decode a frame takes as much as to encode no codes.
        """
        return _scratch.of("kernels", frames * self._scratch_bytes(count), torch.uint8).data_ptr()


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


@functools.lru_cache(maxsize=64)
def _coding(coding: Coding):
    return ctypes.byref(_Coding(coding.coder, coding.predictor, tuple(coding.costs)))


@functools.lru_cache(maxsize=64)
def _step_rule(rule: StepRule):
    return ctypes.byref(_StepRule(*rule[1:]))


def _rows(rows: Rows):
    return ctypes.byref(_Rows(*rows))


def _noise(noise: Noise | None):
    return None if noise is None else ctypes.byref(_Noise(noise.key, noise.first, noise.shift))


def _check(result: int, frame: Tensor, count: int) -> int:
    """Return `result` of a function that reads `frame`; raise DamagedFrame if it reports damage."""
    if result >= 0:
        return result

    def read(first: int, size: int) -> bytes:
        return frame[first : first + size].numpy().tobytes()

    raise damage.error(result, read(0, HEADER_BYTES), frame.numel(), count, read)
