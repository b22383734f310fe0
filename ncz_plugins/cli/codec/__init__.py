"""What an array would compress to, and how fast: the measurements behind `ncz codec`.

    array = read_array("gradients.npy")
    trial = run(array, Config())
    print(trial.ratio, speeds(trial))

The frames are those of `compress`, looked at one by one, so that the array may be a memory-mapped file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ...core.bypass import Bypass, scales_or_bypass
from ...core.codec import container
from ...core.codec.layout import Layout, Window
from ...core.codec.quantize import measure, smallest_bound
from ...core.codec.tensor_codec import CodedTensor, QuantizingCodec, TensorCodec, codec_for
from ...core.config import Config, QuantizerConfig
from ...core.errors import UnsupportedError
from ...core.runtime.device import Host
from ...kernels.format import CHUNK, HEADER, HEADER_BYTES, Coder, Predictor

DTYPES = ("float16", "float32", "float64")
_MAGIC = b"\x93NUMPY"
_WHY_LOSSLESS = {
    Bypass.NON_FINITE: "it holds NaN or infinity, or values so large that the bound would lead there",
    Bypass.NOT_WORTH: "at this bound codes would take about as many bits as the floats",
    Bypass.CODE_OVERFLOW: "where its values vary so little, no bound of this mode is wide enough for 32-bit codes",
}


@dataclass(frozen=True, repr=False)
class Trial:
    """An array and what it became.

    Attributes:
        array: C-contiguous, of one of DTYPES.
        codec, frames: how to make the frames again, and the frames.
        bytes_out: of `compress(array)`: all frames with their headers, the steps, and a head.
        entropy_bits: order-0 entropy of the codes of the whole array, per code; None if there are no codes.
        block: elements that share a bound; 0: all of them.
        bounds: of each block, [blocks], float64; 0 if the quantizer is lossless, not finite if the block isn't.
        errors: the largest of each block, [blocks], float64.
        coders, predictors: how many frames got which, the most frequent first.
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
        """The largest over the blocks."""
        return float(self.bounds.max())

    @property
    def of_bound(self) -> float:
        """The largest error as a share of the bound of its block."""
        return largest_share(self.errors, self.bounds)

    @property
    def blocks_over(self) -> int:
        """How many blocks have an element outside their own bound."""
        smallest = smallest_bound(self.codec.source.data.dtype)
        allowed = np.where(self.bounds > 0, np.maximum(self.bounds, smallest), 0)
        return int((self.errors > allowed).sum())


def read_array(file: str | os.PathLike) -> np.ndarray:
    """The floats of an .npy file, memory-mapped if they lie there as they are needed. Raises UnsupportedError."""
    try:
        with open(file, "rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be read: {error.strerror or error}") from None
    if magic != _MAGIC:
        raise UnsupportedError(f"{file}: is not an .npy file")
    try:
        array = np.load(file, mmap_mode="c", allow_pickle=False)  # copy on write: torch wants writable memory
    except Exception as error:  # whatever a damaged header leads numpy to
        raise UnsupportedError(f"{file}: is not a whole .npy file of numbers: {error}") from None
    native = array.dtype.newbyteorder("=")
    if native.name not in DTYPES:
        raise UnsupportedError(f"{file}: holds {array.dtype}; allowed: {', '.join(DTYPES)}")
    return np.ascontiguousarray(array, dtype=native).reshape(array.shape)


def run(array: np.ndarray, config: Config) -> Trial:
    """Compress and decompress `array`, as `read_array` returns it. Raises BoundError."""
    tensor = torch.from_numpy(array)
    data = container.compress(tensor, config)
    found = container.contents_of(data)
    layout, frames, quantizer = found.layout, found.frames, config.quantizer
    codec = codec_for(config, Host(), CodedTensor(layout, source=Window(tensor.reshape(-1))), found.scales)
    quantized = isinstance(codec, QuantizingCodec)
    bounded = quantizer.kind != "lossless" and array.size > 0
    block = quantizer.block_in_effect if bounded else 0
    errors = np.zeros(layout.chunks)
    codes = Occurrences()
    for index, frame in enumerate(frames):
        elements = layout.frame(0, index)
        own = codec.source[elements]
        codec.tensor = codec.tensor._replace(output=Window(torch.empty_like(own), elements.start))
        codec.decode(0, index, frame)
        errors[layout.frame_chunks(0, index)] = chunk_errors(own.numpy(), codec.output.data.numpy())
        if quantized:
            codes.add(codes_of(codec, index).numpy())
    headers = [HEADER.unpack(frame[:HEADER_BYTES].numpy()) for frame in frames]
    return Trial(
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
    """The codes of one frame, int32."""
    elements = codec.layout.frame(0, index)
    codes = torch.empty(elements.stop - elements.start, dtype=torch.int32)
    inverse_steps = codec.scales.inverse_steps[codec.layout.frame_chunks(0, index)]
    noise = codec.noise and codec.noise._replace(first=elements.start)
    codec.backend.quantize(codec.source[elements], inverse_steps, codes, noise)
    return codes


def chunk_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """The largest of each chunk, [chunks], float64. What is the same has none, be it infinite."""
    same = (x == decoded) | (np.isnan(x) & np.isnan(decoded))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(x.astype(np.float64) - decoded))
    return np.maximum.reduceat(errors, np.arange(0, x.size, CHUNK)) if x.size else errors


def largest_of_blocks(of_chunks: np.ndarray, layout: Layout, block: int) -> np.ndarray:
    """From one number per chunk to one per block."""
    chunks = layout.chunks_per_block(block)
    return np.maximum.reduceat(of_chunks, np.cumsum(chunks) - chunks) if layout.chunks else np.zeros(1)


def block_bounds(codec: TensorCodec, quantizer: QuantizerConfig) -> np.ndarray:
    """The bound of each block, [blocks], float64, from the values themselves, without the roundings of the steps."""
    if quantizer.mode == "abs":
        return np.array([quantizer.value])
    lengths = codec.layout.block_lengths(quantizer.block)
    chunks = codec.layout.chunks_per_block(quantizer.block)
    first = np.cumsum(chunks) - chunks
    low, high, squares = (each.numpy() for each in codec.backend.chunk_statistics(codec.source.data))
    low, high = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
    largest = np.maximum(-low, high)
    if quantizer.mode == "rel":
        return quantizer.value * largest
    if quantizer.mode == "range":
        return quantizer.value * (high - low)
    # The square of a float64 may overflow, or vanish; the root mean square is the second of these at least.
    mean = np.add.reduceat(squares, first) / lengths
    return quantizer.value * np.maximum(np.sqrt(np.where(np.isinf(mean), 0, mean)), largest / np.sqrt(lengths))


def largest_share(errors: np.ndarray, bounds: np.ndarray) -> float:
    """The largest error as a share of the bound of its block, both [blocks]."""
    none_allowed = np.where(errors > 0, np.inf, 0.0)
    return float(np.divide(errors, bounds, out=none_allowed, where=bounds > 0).max())


class Occurrences:
    """How often each code occurs."""

    def __init__(self):
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # values and their counts
        self._joined = 0  # values in the first part, in which all that came before it is joined

    def add(self, codes: np.ndarray) -> None:
        self._parts.append(np.unique(codes, return_counts=True))
        # Not before as many have come again, so that a wide distribution does not take quadratic time.
        if sum(values.size for values, _ in self._parts) > 2 * self._joined + (1 << 20):
            self._join()

    def entropy(self) -> float:
        """Of order 0, in bits per code."""
        self._join()
        _, counts = self._parts[0]
        shares = counts / counts.sum()
        return float((shares * -np.log2(shares)).sum())

    def _join(self) -> None:
        values, counts = (np.concatenate(each) for each in zip(*self._parts))
        values, which = np.unique(values, return_inverse=True)
        self._parts = [(values, np.bincount(which, weights=counts))]
        self._joined = values.size


def _why_lossless(codec: TensorCodec, quantizer: QuantizerConfig) -> str:
    layout, source = codec.layout, codec.source
    measured = measure(codec.backend, source, layout, range(1), quantizer)
    return _WHY_LOSSLESS[scales_or_bypass(measured, layout, quantizer, source.data.dtype, addends=1)]


def _counts(values: Iterable[IntEnum]) -> dict[str, int]:
    return {value.name.lower(): count for value, count in Counter(values).most_common()}
