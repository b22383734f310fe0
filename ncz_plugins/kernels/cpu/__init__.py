"""Compiled kernels for host tensors: one C++ library for all Python versions, loaded by ctypes.

`setup.py` builds `libncz_cpu.so` into this folder. ctypes releases the GIL during each call.

    codec.h       frames, statistics and the C functions; includes all other headers
    portable.cpp, avx2.cpp    primitives for any little-endian processor, and for x86-64 with AVX2
    library.cpp   version of the library, and what the processor lacks
    bits.h        symbols to bits and back
    huffman_code.h, huffman_encoder.h, huffman_decoder.h, rans.h    coders
    symbols.h, tokens.h    working memory for symbols, and the alphabet of HUFFMAN and RANS
    select.h      the selector
    checksum.h    checksum of a frame
    scales.h      quantization steps from root mean squares
    differences.h    differences between floats
    fixed_rate.h  codes of equally many bits, without frames
    combine.h     sums of uncompressed values
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from .. import damage
from ..addresses import address_of
from ..addresses import host_address as address
from ..arrays import NAMES, bytes_of, namespace
from ..backend import HostBackend, require_seals
from ..format import (
    COMBINED,
    FLOATS,
    HEADER_BYTES,
    OCTET,
    Coding,
    Noise,
    Rows,
    SelectorCosts,
    StepRule,
    WrongTensor,
    blocks_of,
    max_frame_bytes,
    packed_bytes,
    rate_blocks_of,
)
from ..scratch import Scratch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..arrays import Array

LIBRARY = Path(__file__).with_name("libncz_cpu.so")
ABI_VERSION = 10  # ncz::ABI_VERSION in common/format.h
_FRAMES_TOGETHER = 4  # FRAMES_TOGETHER in codec.h

_POINTER, _INT32, _INT64, _UINT32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_FUNCTIONS = {  # name: (result, arguments), as at the end of codec.h
    "scratch_bytes": (_INT64, (_INT64,)),
    "checksum": (_UINT32, (_POINTER, _INT64)),
    "digest": (_UINT32, (_POINTER, _INT64)),
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
    "differences": (None, (_POINTER, _POINTER, _INT32, _INT64, _POINTER)),  # with the next four in differences.h
    "rare_differences": (_INT64, (_POINTER, _POINTER, _INT32, _INT64, _INT64, _POINTER, _POINTER)),
    "add_differences": (None, (_POINTER, _POINTER, _INT64, _POINTER, _INT32)),
    "add_rare_differences": (_INT32, (_POINTER, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT32)),
    "decode_changes": (
        _INT32,
        (_POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT32, _POINTER, _POINTER, _POINTER),
    ),
    "combine": (None, (_POINTER, _INT32, _INT32, _INT64, _INT32, _INT32, _POINTER)),  # in combine.h
    "block_magnitudes": (None, (_POINTER, _INT32, _POINTER, _POINTER)),  # with the next three in fixed_rate.h
    "pack": (None, (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _POINTER, _POINTER)),
    "add_packed": (None, (_POINTER, _INT64, _INT64, _INT32, _POINTER, _INT32)),
    "unpack": (None, (_POINTER, _INT64, _INT32, _POINTER, _POINTER, ctypes.c_float, _POINTER, _INT32)),
    "root_mean_squares": (None, (_POINTER, _INT32, _INT64, ctypes.c_double, _POINTER)),  # with the next one in scales.h
    "steps_of": (ctypes.c_double, (_POINTER, _INT64, _POINTER, _POINTER, _POINTER)),
}


class _Numbers(dict):
    """Numbers of dtypes as kernels know them, see format.h. Raises WrongTensor for any other dtype."""

    def __init__(self, names):
        super().__init__()
        self._names = names

    def __missing__(self, dtype):
        name = NAMES[dtype]
        if name not in self._names:
            raise WrongTensor(f"tensors must be of {', '.join(self._names)}, got {name}")
        return self.setdefault(dtype, self._names.index(name))


_DTYPE, _COMBINED_DTYPE = _Numbers(FLOATS), _Numbers(COMBINED)

# Measured by `make bench`, then scaled so that AVX2's FIXED takes half a nanosecond, as on an idle core. The prices of
# RANS come from data of 0.3 and of 3 bits per value.
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
    """C++ kernels compiled for one instruction set: "avx2" or "portable".

    Raises ImportError if the library isn't built, has another version, or can't run on this CPU.
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
        count, dtype = x.numel(), x.dtype
        results = x.new_empty((3, blocks_of(count)), dtype=namespace(x).float64).unbind()
        addresses = (address(each, "results", "float64", blocks_of(count)) for each in results)
        self._block_statistics(address(x, "x", dtype), _DTYPE[dtype], count, *addresses)
        return results

    def quantize(self, x, inverse_steps, codes, noise=None):
        count, floats = _values(x, inverse_steps)
        self._quantize(*floats, address(codes, "codes", "int32", count), _noise(noise))

    def dequantize(self, codes, scales, out):
        count, dtype = out.numel(), out.dtype
        numbers = address(codes, "codes", "int32", count), _per_block(scales, "scales", dtype, count)
        self._dequantize(*numbers, count, address(out, "out", dtype), _DTYPE[dtype])

    def encode_codes(self, codes, coding, frame):
        count = len(codes)
        # Don't rebind `codes`: it may be the only owner of its memory.
        numbers = address(codes, "codes", "int32"), count
        return self._encode_codes(*numbers, _coding(coding), _room(frame, count), self._working_memory(count))

    def decode_codes(self, frame, codes, add=False):
        count, scratch = len(codes), self._working_memory()
        numbers = count, address(codes, "codes", "int32"), add
        _check(self._decode_codes(*_bytes(frame), *numbers, scratch), frame, count)

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        count, floats = _values(x, inverse_steps)
        scratch = self._working_memory(count)
        return self._encode(*floats, _coding(coding), _room(frame, count), _noise(noise), scratch)

    def decode(self, frame, scales, out):
        count, dtype, scratch = out.numel(), out.dtype, self._working_memory()
        floats = _per_block(scales, "scales", dtype, count), count, address(out, "out", dtype), _DTYPE[dtype]
        _check(self._decode(*_bytes(frame), *floats, scratch), frame, count)

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        count, floats = _values(x, inverse_steps)
        how = _coding(coding), _room(out, count, "out"), _noise(noise), self._working_memory(count)
        return _check(self._reduce(*_bytes(frame), *floats, *how), frame, count)

    def decode_sum(self, sum, scales, noise=None, sealed=False):
        x, inverse_steps, out, frames, first = sum
        if len(frames) != 1 or out.dtype != x.dtype:  # dtypes differ if error feedback keeps float32 for half types
            return super().decode_sum(sum, scales, noise, sealed)
        if sealed:
            require_seals(frames)
        [frame] = frames
        count, (*values, _) = _values(x, inverse_steps)
        floats = *values, _per_block(scales, "scales", x.dtype, count), count, address(out, "out", x.dtype, count)
        noise, scratch = _noise(noise and noise.from_block(first)), self._working_memory()
        _check(self._decode_sum(*_bytes(frame), *floats, noise, scratch), frame, count)

    def _added_up(self, sum, noise):
        x, inverse_steps, _, frames, first = sum
        count, floats = _values(x, inverse_steps)
        codes, scratch = _scratch.of("sum", count, "int32"), self._working_memory(frames=_FRAMES_TOGETHER)
        values = *floats, address(codes, "codes", "int32", count)
        noise = _noise(noise and noise.from_block(first))
        for at in range(0, max(1, len(frames)), _FRAMES_TOGETHER):
            some = frames[at : at + _FRAMES_TOGETHER]
            pointers = (_POINTER * len(some))(*(_bytes(frame)[0] for frame in some))
            sizes = (_INT64 * len(some))(*(frame.numel() for frame in some))
            if self._add_up(pointers, sizes, len(some), *values, noise, scratch) < 0:
                for frame in some:
                    self.decode_codes(frame, codes)  # raises the error of the frame that is damaged
            values = None, *values[1:]
        return codes

    def checksum(self, frame):
        return self._checksum(*_bytes(frame, HEADER_BYTES))

    def digest(self, data):
        return self._digest(address(data, "data", data.dtype), data.nbytes)

    def differences(self, x, base, codes):
        count, dtype = len(x), x.dtype
        number = _DTYPE[dtype]
        floats = address(x, "x", dtype), address(base, "base", dtype, count)
        self._differences(*floats, number, count, address(codes, "codes", "int32", count))

    def rare_differences(self, x, base, most, gaps, codes):
        count, dtype = len(x), x.dtype
        number = _DTYPE[dtype]
        floats = address(x, "x", dtype), address(base, "base", dtype, count), number, count
        rare = address(gaps, "gaps", "int32", count + OCTET), address(codes, "codes", "int32", most)
        return self._rare_differences(*floats, most, *rare)

    def add_differences(self, codes, base, out):
        count, dtype = len(out), out.dtype
        number = _DTYPE[dtype]
        known = address(codes, "codes", "int32", count), address(base, "base", dtype, count)
        self._add_differences(*known, count, address(out, "out", dtype), number)

    def add_rare_differences(self, gaps, codes, base, out):
        count, dtype, changes = len(out), out.dtype, len(codes)
        number = _DTYPE[dtype]
        rare = address(gaps, "gaps", "int32", changes), address(codes, "codes", "int32"), changes
        floats = address(base, "base", dtype, count), count, address(out, "out", dtype)
        return bool(self._add_rare_differences(*rare, *floats, number))

    def decode_changes(self, frame, base, out, digests=None):
        count, dtype = len(out), out.dtype
        number = _DTYPE[dtype]
        floats = address(base, "base", dtype, count), count, address(out, "out", dtype), number
        sums = None if digests is None else address(digests, "digests", "uint32", 2)
        codes = address_of(_scratch.of("changes", count, "int32"))
        return bool(self._decode_changes(*_bytes(frame), *floats, sums, codes, self._working_memory()))

    def combination(self, values, how, out, divisor=1):
        count, dtype = out.numel(), out.dtype
        pointers = (_POINTER * len(values))(*[address(each, "values", dtype, count) for each in values])
        result = _COMBINED_DTYPE[dtype], count, int(how), divisor, address(out, "out", dtype)
        return functools.partial(self._combine, pointers, len(values), *result)

    def root_mean_squares(self, x, most, out):
        count, dtype = x.numel(), x.dtype
        floats = address(x, "x", dtype), _DTYPE[dtype], count
        self._root_mean_squares(*floats, most, address(out, "out", "bfloat16", blocks_of(count)))

    def steps_of(self, agreed, rule):
        blocks = agreed.numel()
        found = inverse_steps, scales = agreed.new_empty((2, blocks), dtype=namespace(agreed).float32).unbind()
        results = (address(each, "steps", "float32", blocks) for each in found)
        given = address(agreed, "agreed", "bfloat16"), blocks, _step_rule(rule)
        return inverse_steps, scales, self._steps_of(*given, *results)

    def block_magnitudes(self, x, rows, magnitudes):
        floats = address(x, "x", x.dtype, rows.numel), _DTYPE[x.dtype]
        self._block_magnitudes(*floats, _rows(rows), _magnitudes(magnitudes, rows))

    def pack(self, x, rows, magnitudes, bits, packed, noise=None):
        floats = address(x, "x", x.dtype, rows.numel), _DTYPE[x.dtype], _rows(rows), _magnitudes(magnitudes, rows)
        self._pack(*floats, bits, _noise(noise), _packed(packed, "packed", rows.count * rows.blocks, bits))

    def add_packed(self, packed, count, bits, out, out_bits):
        blocks = out.numel() // packed_bytes(out_bits)
        sums = _packed(out, "out", blocks, out_bits), out_bits
        self._add_packed(_packed(packed, "packed", count * blocks, bits), count, blocks, bits, *sums)

    def unpack(self, packed, addends, bits, rows, magnitudes, denominator, out):
        codes = _packed(packed, "packed", addends * rows.count * rows.blocks, bits), addends, bits
        scales = _rows(rows), _magnitudes(magnitudes, rows), denominator
        self._unpack(*codes, *scales, address(out, "out", out.dtype, rows.numel), _DTYPE[out.dtype])

    def _working_memory(self, count: int = 0, frames: int = 1) -> int:
        """Address of working memory to encode `count` codes, or to decode `frames` frames together.

        Decoding a frame takes as much memory as encoding no codes.
        """
        # No check is needed: this line itself says the dtype and the length.
        return address_of(_scratch.of("kernels", frames * self._scratch_bytes(count), "uint8"))


# ------------------------------------------------------------------ checked addresses of arguments


def _values(x: Tensor, inverse_steps: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """Number of values in `x`, and the kernel arguments: addresses of values and steps, number of the dtype, count."""
    count, dtype = x.numel(), x.dtype
    steps = _per_block(inverse_steps, "inverse_steps", dtype, count)
    return count, (address(x, "x", dtype), _DTYPE[dtype], steps, count)


def _per_block(numbers: Tensor, name: str, dtype: torch.dtype, count: int) -> int:
    """Address of one number for each block of `count` values of `dtype`."""
    return address(numbers, name, "float64" if NAMES[dtype] == "float64" else "float32", blocks_of(count))


def _bytes(frame: Array, least: int = 0) -> tuple[int, int]:
    """Address and size of a frame to read."""
    return address(frame, "frame", "uint8", least), len(frame)


def _room(frame: Array, count: int, name: str = "frame") -> int:
    """Address of memory for a frame of `count` codes."""
    return address(frame, name, "uint8", max_frame_bytes(count))


def _magnitudes(magnitudes: Tensor, rows: Rows) -> int:
    """Address of the magnitudes of all rows."""
    return address(magnitudes, "magnitudes", "bfloat16", rows.count * rate_blocks_of(rows.elements))


def _packed(packed: Tensor, name: str, blocks: int, bits: int) -> int:
    """Address of the packed codes of `blocks` blocks."""
    return address(packed, name, "uint8", blocks * packed_bytes(bits))


@functools.cache
def _library() -> ctypes.CDLL:
    """The loaded library. Raises ImportError if it isn't built, does not load or has another version."""
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


def _check(result: int, frame: Array, count: int) -> int:
    """Return the `result` of a function that read `frame`. Raises DamagedFrame if the result reports damage."""
    if result >= 0:
        return result

    def read(first: int, size: int) -> bytes:
        return bytes_of(frame[first : first + size])

    raise damage.error(result, read(0, HEADER_BYTES), len(frame), count, read)
