"""Round trip of an array through the codec: ratio, errors, and how its frames were coded.

Frames are those of `compress`, decoded one by one, so that the array may be a memory-mapped file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ...core.bypass import Bypass, scales_or_bypass
from ...core.codec import container
from ...core.codec.coded_tensor import CodedTensor
from ...core.codec.from_config import codec_for
from ...core.codec.layout import Window
from ...core.codec.quantize import measure, most_summable, smallest_bound
from ...core.codec.tensor_codec import QuantizingCodec, TensorCodec
from ...core.config import Config, QuantizerConfig
from ...core.runtime.device import Host
from ...kernels.format import HEADER, HEADER_BYTES, Coder, Predictor
from .block_errors import block_bounds, largest_of_blocks, largest_share, step_errors
from .entropy import Occurrences

_WHY_LOSSLESS = {
    Bypass.NON_FINITE: "it contains NaN or infinity, or values so large that the bound would lead to infinity",
    Bypass.NOT_WORTH: "at this bound codes would take about as many bits as the floats",
    Bypass.CODE_OVERFLOW: "its values vary so little in places that no bound of this mode fits 32-bit codes",
}


@dataclass(frozen=True, repr=False)
class RoundTrip:
    """Array, compressed and decompressed.

    Attributes:
        array: the array, C-contiguous, with a dtype of DTYPES.
        codec: the codec that encodes and decodes the frames.
        frames: the frames.
        bytes_out: bytes of `compress(array)`: frames with headers, scales, and a head.
        entropy_bits: order-0 entropy of all codes in bits per code; None if there are no codes.
        block: elements that share a bound; 0: all of them.
        bounds: error bound of each block, [blocks], float64; 0 if the quantizer is lossless, not finite if the block
            is not finite.
        errors: largest error of each block, [blocks], float64.
        coders, predictors: name -> number of frames, the most frequent first.
        lossless_because: why the array was not quantized although the configuration asks for it; else None.
    """

    array: np.ndarray
    codec: TensorCodec
    frames: list[Tensor]
    bytes_out: int
    entropy_bits: float | None
    block: int
    bounds: np.ndarray
    errors: np.ndarray
    coders: dict[str, int]
    predictors: dict[str, int]
    lossless_because: str | None

    @property
    def ratio(self) -> float:
        return self.array.nbytes / self.bytes_out

    @property
    def bits_per_value(self) -> float:
        return 8 * self.bytes_out / self.array.size if self.array.size else math.nan

    @property
    def max_abs_error(self) -> float:
        return float(self.errors.max())

    @property
    def bound_abs(self) -> float:
        """Largest bound of a block."""
        return float(self.bounds.max())

    @property
    def of_bound(self) -> float:
        """Largest error as a share of the bound of its block."""
        return largest_share(self.errors, self.bounds)

    @property
    def blocks_over(self) -> int:
        """Number of blocks with an error above their bound."""
        smallest = smallest_bound(self.codec.source.data.dtype)
        allowed = np.where(self.bounds > 0, np.maximum(self.bounds, smallest), 0)
        return int((self.errors > allowed).sum())


def round_trip(array: np.ndarray, config: Config) -> RoundTrip:
    """Compress and decompress `array`, an array that `read_array` returned. Raises BoundError."""
    # Compress the array, and open what was written.
    tensor = torch.from_numpy(array)
    data = container.compress(tensor, config)
    found = container.contents_of(data)
    layout, frames, quantizer = found.layout, found.frames, config.quantizer
    codec = codec_for(config, Host(), CodedTensor(layout, source=Window(tensor.reshape(-1))), found.scales)
    quantized = isinstance(codec, QuantizingCodec)
    bounded = quantizer.kind != "lossless" and array.size > 0
    block = quantizer.block_in_effect if bounded else 0

    # Decode each frame, and compare it with the array.
    errors = np.zeros(layout.steps)
    codes = Occurrences()
    for index, frame in enumerate(frames):
        elements = layout.frame(0, index)
        own = codec.source[elements]
        codec.tensor = codec.tensor._replace(output=Window(torch.empty_like(own), elements.start))
        codec.decode(0, index, frame)
        errors[layout.frame_steps(0, index)] = step_errors(own.numpy(), codec.output.data.numpy())
        if quantized:
            codes.add(codes_of(codec, index).numpy())
    headers = [HEADER.unpack(frame[:HEADER_BYTES].numpy()) for frame in frames]
    return RoundTrip(
        array=array,
        codec=codec,
        frames=frames,
        bytes_out=data.numel(),
        entropy_bits=codes.entropy() if quantized else None,
        block=block,
        bounds=block_bounds(codec, quantizer) if bounded else np.zeros(1),
        errors=largest_of_blocks(errors, layout, block),
        coders=_counts(Coder(header[2]) for header in headers),
        predictors=_counts(Predictor(header[3]) for header in headers),
        lossless_because=_why_lossless(codec, quantizer) if bounded and not quantized else None,
    )


def codes_of(codec: QuantizingCodec, index: int) -> Tensor:
    """Codes of one frame, int32, 1-D."""
    elements = codec.layout.frame(0, index)
    codes = torch.empty(elements.stop - elements.start, dtype=torch.int32, device="cpu")
    steps = codec.layout.frame_steps(0, index)
    noise = codec.noise and codec.noise.from_block(steps.start)
    codec.backend.quantize(codec.source[elements], codec.scales.inverse_steps[steps], codes, noise)
    return codes


def _why_lossless(codec: TensorCodec, quantizer: QuantizerConfig) -> str:
    layout, source = codec.layout, codec.source
    most = most_summable(quantizer, source.data.dtype, addends=1)
    measured = measure(codec.backend, source, layout, range(1), quantizer, most=most)
    return _WHY_LOSSLESS[scales_or_bypass(measured, layout, quantizer, source.data.dtype, addends=1)]


def _counts(values: Iterable[IntEnum]) -> dict[str, int]:
    return {value.name.lower(): count for value, count in Counter(values).most_common()}
