"""Bits per value and coder, found by coding a sample with the real kernels.

The sample are Laplace-distributed values, different on each rank, which compress like the gradients of a small GPT.
"""

from __future__ import annotations

import math
import statistics
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .... import kernels
from ....core.bypass import Bypass, scales_or_bypass
from ....core.codec.from_config import coding_for, noise_for
from ....core.codec.layout import Layout, Window
from ....core.codec.quantize import measure
from ....core.config import Config, QuantizerConfig
from ....core.errors import ConfigError
from ....kernels.format import HEADER, HEADER_BYTES, RATE_BLOCK, Coder, max_frame_bytes

_SAMPLE_VALUES = 1 << 17
_MAX_ADDENDS = 32  # largest number of ranks whose codes are really added; each further doubling adds half a bit
_FLOAT_BITS = 32


class CodeSizes(Protocol):
    """Sizes of codes."""

    def bits(self, addends: int) -> float:
        """Mean bits per value in a sum of the codes of `addends` ranks."""

    def coder(self, addends: int) -> str:
        """Name of the coder that writes such sums."""


def sizes_for(config: Config, ratio: float | None = None, ratio_ranks: int = 1) -> CodeSizes:
    """Sizes of codes with the settings of `config`.

    Args:
        config: must be resolved.
        ratio: known compression ratio relative to fp32; None: that of the sample.
        ratio_ranks: number of ranks of the all-reduces with that ratio; 1 for the codes of one rank.

    Raises ConfigError if `ratio` is None and the sample does not apply (mode abs, kind lossless), or if nothing would
    be compressed.
    """
    quantizer = config.quantizer
    if quantizer.bits is not None:
        return FixedRateSizes(quantizer.bits)
    if ratio is None and (quantizer.mode == "abs" or quantizer.kind == "lossless"):
        raise ConfigError(f"quantizer {quantizer.describe()}: its ratio depends on the values: give --ratio")
    if quantizer.kind == "lossless":
        return LosslessSizes(ratio)
    if quantizer.mode == "abs":  # sums grow alike in all modes
        config = config.model_copy(update={"quantizer": QuantizerConfig()})
    return SampledSizes(config, ratio, ratio_ranks)


class SampledSizes:
    """Sizes of a coded sample; for the arguments see `sizes_for`."""

    def __init__(self, config: Config, ratio: float | None = None, ratio_ranks: int = 1):
        self._config = config
        self._more = 0.0
        if ratio is not None:
            # Two ranks exchange codes of single ranks. More send as many values again as sums of all.
            ends = (1, ratio_ranks) if ratio_ranks > 2 else (1,)
            self._more = _FLOAT_BITS / ratio - statistics.fmean(map(self.bits, ends))

    def bits(self, addends: int) -> float:
        most = min(addends, _MAX_ADDENDS)
        grown = 0.5 * math.log2(addends / most)
        return max(0.05, self._sampled(most).bits + grown + self._more)

    def coder(self, addends: int) -> str:
        return self._sampled(min(addends, _MAX_ADDENDS)).coder

    def _sampled(self, addends: int) -> Sampled:
        lower = 1 << (addends.bit_length() - 1)
        if lower == addends:
            return _sampled(self._config, addends)
        below, above = _sampled(self._config, lower), _sampled(self._config, 2 * lower)
        part = math.log2(addends / lower)
        return Sampled((1 - part) * below.bits + part * above.bits, below.coder)


class LosslessSizes:
    """Sizes of floats compressed without loss. A sum takes as many bits as a single value."""

    def __init__(self, ratio: float):
        self._bits = _FLOAT_BITS / ratio

    def bits(self, addends: int) -> float:
        return self._bits

    def coder(self, addends: int) -> str:
        return "huffman"


class FixedRateSizes:
    """Sizes at a fixed rate of `bits` per code. Sums take as many more bits as their largest value needs."""

    def __init__(self, bits: int):
        self._bits = bits

    def bits(self, addends: int) -> float:
        return self._bits + math.ceil(math.log2(addends)) + 16 / RATE_BLOCK  # 16: the scale of each block in bfloat16

    def coder(self, addends: int) -> str:
        return "packed"


class Sampled(NamedTuple):
    """Result of coding one sum: bits per value, and name of the coder."""

    bits: float
    coder: str


@lru_cache(maxsize=256)
def _sampled(config: Config, addends: int) -> Sampled:
    """Code a sum of the sample codes of `addends` ranks."""
    backend, total = kernels.cpu_backend(), _sum_of_codes(config.quantizer, addends)
    frame = torch.empty(max_frame_bytes(_SAMPLE_VALUES), dtype=torch.uint8, device="cpu")
    nbytes = backend.encode_codes(total, coding_for(config, backend), frame)
    _, _, coder, *_ = HEADER.unpack(frame[:HEADER_BYTES].numpy())
    return Sampled(8 * (nbytes - HEADER_BYTES) / _SAMPLE_VALUES, Coder(coder).name.lower())


@lru_cache(maxsize=8)  # one for each number of addends that is sampled, and the same for all links
def _sum_of_codes(quantizer: QuantizerConfig, addends: int) -> torch.Tensor:
    """Sum of the sample codes of `addends` ranks, int32, [_SAMPLE_VALUES]."""
    backend = kernels.cpu_backend()
    layout = Layout.split(_SAMPLE_VALUES, 1, _SAMPLE_VALUES, quantizer.block_in_effect)
    ranks = [_sample(rank) for rank in range(addends)]
    # Agree on scales, as ranks do.
    measured = [measure(backend, Window(x), layout, range(1), quantizer) for x in ranks]
    agreed = torch.stack([each.float() for each in measured]).amax(0).to(measured[0].dtype)
    scales = scales_or_bypass(agreed, layout, quantizer, torch.float32, addends)
    if isinstance(scales, Bypass):
        raise ConfigError(f"quantizer {quantizer.describe()}: nothing would be compressed: {scales.value}")
    # Add the codes of all ranks.
    total = torch.zeros(_SAMPLE_VALUES, dtype=torch.int32, device="cpu")
    codes = torch.empty_like(total)
    for rank, x in enumerate(ranks):
        backend.quantize(x, scales.inverse_steps, codes, noise_for(Config(quantizer=quantizer), 1, rank, addends))
        total += codes
    return total


@lru_cache(maxsize=_MAX_ADDENDS)
def _sample(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).laplace(size=_SAMPLE_VALUES).astype(np.float32))
