"""Executable specification of every kernel, in numpy: docs/reference/wire-format.md as a program.

Slow and plain on purpose. The C++ kernels must produce the same bytes. So must the CUDA kernels, by the coders of GPUs
(format.ON_GPUS) and but for the order of chunks in PLANES. This backend also runs where no compiled library loads. The
modules work on numpy arrays, and `ReferenceBackend` on tensors, too. numpy lacks bfloat16, so bfloat16 is first
widened to float32, which is exact.

    values    floats to codes and back, statistics, random numbers
    symbols   codes to symbols and tokens
    fixed, huffman, planes, huffman32, rans, bits    the coders
    select    the coder and predictor that AUTO stands for
    frames    whole frames
    differences    differences between floats
    fixed_rate    codes of equally many bits, without frames
    scales    from the values of blocks to their quantization steps
    combine    sums of uncompressed values
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..arrays import numpy_of, put
from ..backend import HostBackend
from . import combine, differences, fixed_rate, frames, scales, values

if TYPE_CHECKING:
    from ..arrays import Array


class ReferenceBackend(HostBackend):
    """Numpy kernels behind the interface of all backends.

    Args:
        on_gpus: whether frames have the coders of GPUs, see format.ON_GPUS.
    """

    name = "reference"

    def __init__(self, on_gpus: bool = False):
        self._on_gpus = on_gpus

    def block_statistics(self, x):
        return tuple(torch.from_numpy(each) for each in values.block_statistics(_values(x)))

    def quantize(self, x, inverse_steps, codes, noise=None):
        codes.copy_(torch.from_numpy(values.quantize(_values(x), inverse_steps.numpy(), noise)))

    def dequantize(self, codes, scales, out):
        out.copy_(torch.from_numpy(values.dequantize(codes.numpy(), scales.numpy())))

    def encode_codes(self, codes, coding, frame):
        data = frames.encode_codes(numpy_of(codes), coding, self._on_gpus)
        put(data, frame[: len(data)])
        return len(data)

    def decode_codes(self, frame, codes, add=False):
        decoded = frames.decode_codes(numpy_of(frame).tobytes(), len(codes), self._on_gpus)
        numpy_of(codes)[:] = numpy_of(codes) + decoded if add else decoded

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        codes = torch.empty(x.numel(), dtype=torch.int32, device="cpu")
        self.quantize(x, inverse_steps, codes, noise)
        return self.encode_codes(codes, coding, frame)

    def decode(self, frame, scales, out):
        codes = torch.empty(out.numel(), dtype=torch.int32, device="cpu")
        self.decode_codes(frame, codes)
        self.dequantize(codes, scales, out)

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        codes = torch.empty(x.numel(), dtype=torch.int32, device="cpu")
        self.quantize(x, inverse_steps, codes, noise)
        self.decode_codes(frame, codes, add=True)
        return self.encode_codes(codes, coding, out)

    def checksum(self, frame):
        return frames.checksum(numpy_of(frame).tobytes())

    def differences(self, x, base, codes):
        numpy_of(codes)[:] = differences.differences(_integers(x), _integers(base))

    def rare_differences(self, x, base, most, gaps, codes):
        changes = differences.differences(_integers(x), _integers(base))
        places = np.flatnonzero(changes)
        if len(places) <= most:
            numpy_of(gaps)[: len(places)] = np.diff(places, prepend=-1) - 1
            numpy_of(codes)[: len(places)] = changes[places]
        return len(places)

    def add_differences(self, codes, base, out):
        _integers(out)[:] = differences.restored(numpy_of(codes), _integers(base))

    def add_rare_differences(self, gaps, codes, base, out):
        places = differences.places(numpy_of(gaps), numpy_of(codes), len(base))
        if places is None:
            return False
        changed = differences.restored(numpy_of(codes), _integers(base)[places])
        _integers(out)[:] = _integers(base)
        _integers(out)[places] = changed
        return True

    def root_mean_squares(self, x, most, out):
        _bits(out)[:] = scales.root_mean_squares(_values(x), most)

    def steps_of(self, agreed, rule):
        inverse_steps, of_codes, spread = scales.steps_of(_bits(agreed), rule)
        return torch.from_numpy(inverse_steps), torch.from_numpy(of_codes), spread

    def combination(self, values, how, out, divisor=1):
        def combine_them() -> None:
            together = [_values(each) if out.is_floating_point() else each.numpy() for each in values]
            out.copy_(torch.from_numpy(combine.combined(together, how, divisor)))

        return combine_them

    def block_magnitudes(self, x, rows, magnitudes):
        _bits(magnitudes)[:] = fixed_rate.block_magnitudes(_values(x), rows)

    def pack(self, x, rows, magnitudes, bits, packed, noise=None):
        data = fixed_rate.pack(_values(x), rows, _bits(magnitudes), bits, noise)
        packed.view(-1).copy_(torch.from_numpy(data))

    def add_packed(self, packed, count, bits, out, out_bits):
        data = fixed_rate.add_packed(packed.view(count, -1).numpy(), bits, out_bits)
        out.view(-1).copy_(torch.from_numpy(data))

    def unpack(self, packed, addends, bits, rows, magnitudes, denominator, out):
        codes = packed.view(addends, -1).numpy()
        for elements, found in fixed_rate.unpack(codes, bits, rows, _bits(magnitudes), denominator):
            # torch converts several NaNs at once to other bits than a single one.
            out[elements] = torch.nan if np.isnan(found).any() else torch.from_numpy(found)


def _values(x: torch.Tensor) -> np.ndarray:
    """`x` as float64 if it is float64, else as float32. Widening the half types is exact."""
    return x.numpy() if x.dtype == torch.float64 else x.to(torch.float32).numpy()


def _integers(floats: Array) -> np.ndarray:
    """Bits of floats of 16 or 32 bits, as signed integers in the same memory."""
    return numpy_of(floats).view(f"i{floats.itemsize}")


def _bits(magnitudes: torch.Tensor) -> np.ndarray:
    """Bits of bfloat16 numbers, as uint16 in the same memory."""
    return magnitudes.view(-1).view(torch.int16).numpy().view(np.uint16)
