"""How many bits codes take, and which coder writes them: found by coding a sample with the real kernels.

The sample are Laplace values, other ones on every rank, which compress as the gradients of a small GPT do.
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
from ....core.codec.layout import Layout, Window
from ....core.codec.quantize import measure
from ....core.codec.tensor_codec import coding_for, noise_for
from ....core.config import Config, QuantizerConfig
from ....core.errors import ConfigError
from ....kernels.format import HEADER, HEADER_BYTES, RATE_BLOCK, Coder, max_frame_bytes

_VALUES = 1 << 17
_MOST_ADDENDS = 32  # that are added up for real: from there on a sum takes half a bit more for each doubling
_BITS = 32  # of a float


class CodeSizes(Protocol):
    """What codes take."""

    def bits(self, addends: int) -> float:
        """Of one value, on average, in a sum of so many ranks' codes."""

    def coder(self, addends: int) -> str:
        """The name of the coder that writes such sums."""


def sizes_for(config: Config, ratio: float | None = None, ratio_ranks: int = 1) -> CodeSizes:
    """What codes take with the settings of `config`, a resolved one.

    Args:
        ratio: what codes are known to compress to, to fp32. None: as those of the sample do.
        ratio_ranks: of how many ranks' all-reduces that is known; 1: of the codes of one rank.

    Raises ConfigError where no sample can tell and `ratio` is None, and where nothing would be compressed.
    """
    quantizer = config.quantizer
    if quantizer.bits is not None:
        return FixedRateSizes(quantizer.bits)
    if ratio is None and (quantizer.mode == "abs" or quantizer.kind == "lossless"):
        raise ConfigError(
            f"quantizer {quantizer.describe()}: what that compresses to depends on the values: give --ratio"
        )
    if quantizer.kind == "lossless":
        return LosslessSizes(ratio)
    if quantizer.mode == "abs":  # sums grow alike, whatever the bound is relative to
        config = config.model_copy(update={"quantizer": QuantizerConfig()})
    return SampledSizes(config, ratio, ratio_ranks)


class SampledSizes:
    """Those of a sample; see `sizes_for`."""

    def __init__(self, config: Config, ratio: float | None = None, ratio_ranks: int = 1):
        self._config = config
        self._more = 0.0
        if ratio is not None:
            # Two ranks exchange codes of single ranks. More send as many values again as sums of all.
            ends = (1, ratio_ranks) if ratio_ranks > 2 else (1,)
            self._more = _BITS / ratio - statistics.fmean(map(self.bits, ends))

    def bits(self, addends: int) -> float:
        most = min(addends, _MOST_ADDENDS)
        grown = 0.5 * math.log2(addends / most)
        return max(0.05, self._sampled(most).bits + grown + self._more)

    def coder(self, addends: int) -> str:
        return self._sampled(min(addends, _MOST_ADDENDS)).coder

    def _sampled(self, addends: int) -> Sampled:
        lower = 1 << (addends.bit_length() - 1)
        if lower == addends:
            return _sampled(self._config, addends)
        below, above = _sampled(self._config, lower), _sampled(self._config, 2 * lower)
        part = math.log2(addends / lower)
        return Sampled((1 - part) * below.bits + part * above.bits, below.coder)


class LosslessSizes:
    """Those of floats, whose sums take as much as they do."""

    def __init__(self, ratio: float):
        self._bits = _BITS / ratio

    def bits(self, addends: int) -> float:
        return self._bits

    def coder(self, addends: int) -> str:
        return "huffman"


class FixedRateSizes:
    """Those of a fixed rate of `bits` for each rank's code; sums take as many more as they can need."""

    def __init__(self, bits: int):
        self._bits = bits

    def bits(self, addends: int) -> float:
        return self._bits + math.ceil(math.log2(addends)) + 16 / RATE_BLOCK  # the magnitude of each block in bfloat16

    def coder(self, addends: int) -> str:
        return "packed"


class Sampled(NamedTuple):
    """What one sum of codes came to."""

    bits: float
    coder: str


@lru_cache(maxsize=256)
def _sampled(config: Config, addends: int) -> Sampled:
    """What a sum of so many ranks' codes takes."""
    quantizer, backend = config.quantizer, kernels.cpu_backend()
    layout = Layout.split(_VALUES, 1, _VALUES, quantizer.block_in_effect)
    ranks = [_values(rank) for rank in range(addends)]
    measured = [measure(backend, Window(x), layout, range(1), quantizer) for x in ranks]
    agreed = torch.stack([each.float() for each in measured]).amax(0).to(measured[0].dtype)
    scales = scales_or_bypass(agreed, layout, quantizer, torch.float32, addends)
    if isinstance(scales, Bypass):
        raise ConfigError(f"quantizer {quantizer.describe()}: nothing would be compressed: {scales.value}")
    total = torch.zeros(_VALUES, dtype=torch.int32, device="cpu")
    codes = torch.empty_like(total)
    for rank, x in enumerate(ranks):
        backend.quantize(x, scales.inverse_steps, codes, noise_for(config, 1, rank, addends))
        total += codes
    frame = torch.empty(max_frame_bytes(_VALUES), dtype=torch.uint8, device="cpu")
    nbytes = backend.encode_codes(total, coding_for(config, backend), frame)
    _, _, coder, *_ = HEADER.unpack(frame[:HEADER_BYTES].numpy())
    return Sampled(8 * (nbytes - HEADER_BYTES) / _VALUES, Coder(coder).name.lower())


def _values(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).laplace(size=_VALUES).astype(np.float32))
