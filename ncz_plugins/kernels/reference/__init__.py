"""The executable specification of every kernel, in numpy: docs/reference/wire-format.md as a program.

Slow and plain on purpose: the C++ and CUDA kernels must produce the same bytes. It also runs where no compiled library
loads. The modules work on numpy arrays; `ReferenceBackend` wraps torch tensors. numpy lacks bfloat16, so bfloat16 is
first widened to float32, which is exact.

    values    floats to codes and back, statistics, random numbers
    symbols   codes to symbols and tokens
    fixed, huffman, rans, bits    the coders
    select    the coder and predictor that AUTO stands for
    frames    whole frames
"""

from __future__ import annotations

import numpy as np
import torch

from ..backend import Backend
from . import frames, values


class ReferenceBackend(Backend):
    """The numpy kernels behind the interface that all backends share."""

    name = "reference"

    def chunk_statistics(self, x):
        return tuple(torch.from_numpy(each) for each in values.chunk_statistics(_values(x)))

    def quantize(self, x, inverse_steps, codes, noise=None):
        codes.copy_(torch.from_numpy(values.quantize(_values(x), inverse_steps.numpy(), noise)))

    def dequantize(self, codes, scales, out):
        out.copy_(torch.from_numpy(values.dequantize(codes.numpy(), scales.numpy())))

    def encode_codes(self, codes, coding, frame):
        data = frames.encode_codes(codes.numpy(), coding)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return len(data)

    def decode_codes(self, frame, codes, add=False):
        decoded = torch.from_numpy(frames.decode_codes(frame.numpy().tobytes(), codes.numel()))
        codes.add_(decoded) if add else codes.copy_(decoded)

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        codes = torch.empty(x.numel(), dtype=torch.int32)
        self.quantize(x, inverse_steps, codes, noise)
        return self.encode_codes(codes, coding, frame)

    def decode(self, frame, scales, out):
        codes = torch.empty(out.numel(), dtype=torch.int32)
        self.decode_codes(frame, codes)
        self.dequantize(codes, scales, out)

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        codes = torch.empty(x.numel(), dtype=torch.int32)
        self.quantize(x, inverse_steps, codes, noise)
        self.decode_codes(frame, codes, add=True)
        return self.encode_codes(codes, coding, out)

    def checksum(self, frame):
        return frames.checksum(frame.numpy().tobytes())


def _values(x: torch.Tensor) -> np.ndarray:
    """`x` as float64 if it is that, else as float32. Widening the half types is exact."""
    return x.numpy() if x.dtype == torch.float64 else x.to(torch.float32).numpy()
