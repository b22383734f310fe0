"""From what a tensor holds to the quantization step that all ranks share.

Every rank measures its own values, a MAX all-reduce joins the measurements, and from the joined
vector each rank derives the same steps, or the same reason not to compress. MAX is exact, so the
outcome does not depend on the order in which a backend combines ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ..kernels.backend import Backend
from .config import Quantizer
from .frame import Layout, Window

# Share of the largest magnitude that the arithmetic itself may add to the error: two roundings in
# quantizing (1/step, the product), up to three in dequantizing (int to float, step/n, the product).
# Reserving it keeps the bound strict; naive code exceeds it by 2% at a bound of 1e-6.
_ROUNDINGS = 6
_MAX_CODE = 2**31 - 1
_WORTH = 0.9  # expected bits per value, as a share of the plain ones, above which coding is not tried


class Bypass(str, Enum):
    """Why a call went the plain way."""

    ONE_RANK = "one rank"
    ROLE = "role not enabled"
    DTYPE = "dtype"
    OP = "reduce op"
    TOO_SMALL = "too small"
    NON_FINITE = "non-finite"  # a value is, or a result could become so
    CODE_OVERFLOW = "code overflow"
    NOT_WORTH = "not worth it"


@dataclass(frozen=True)
class Scales:
    """What turns values into codes and codes into values: one number per chunk, [chunks].

    Attributes:
        inverse_steps: 1/step; float64 for float64 tensors, float32 for all others.
        scales: what a summed code is multiplied by: step, or step/n for an average.
    """

    inverse_steps: Tensor
    scales: Tensor


def work_dtype(dtype: torch.dtype) -> type[np.floating]:
    """The numpy dtype in which values of `dtype` are quantized."""
    return np.float64 if dtype == torch.float64 else np.float32


def measure(backend: Backend, source: Window, layout: Layout, segments: range, quantizer: Quantizer) -> Tensor:
    """This rank's part of the agreement: [1 + blocks], in the dtype that steps have.

    The first number is the largest magnitude; the others are what the bound is relative to, per
    block. Only `segments` are looked at (others count as zero); +inf stands for NaN and infinity.
    """
    absmax = np.zeros(layout.chunks)
    squares = np.zeros(layout.chunks)
    for i in segments:
        here = layout.segment_chunks(i)
        largest, total = backend.chunk_statistics(source[layout.segment(i)])
        absmax[here], squares[here] = largest.numpy(), total.numpy()
    measured = [absmax.max(initial=0.0)]
    if quantizer.mode != "abs":
        sizes = layout.chunks_per_block(quantizer.block)
        first = np.cumsum(sizes) - sizes
        if quantizer.mode == "rel":
            relative_to = np.maximum.reduceat(absmax, first)
        else:
            relative_to = np.sqrt(np.add.reduceat(squares, first) / layout.block_lengths(quantizer.block))
        measured = np.concatenate([measured, relative_to])
    return torch.from_numpy(_rounded_up(np.asarray(measured), work_dtype(source.data.dtype)))


def derive(
    agreed: Tensor, layout: Layout, quantizer: Quantizer, dtype: torch.dtype, addends: int, divisor: int = 1
) -> Scales | Bypass:
    """The steps that follow from the agreed vector, or the reason to go the plain way.

    Args:
        agreed: element-wise maximum over ranks of what `measure` returned.
        addends: how many ranks' codes are summed (1 for gathers and broadcasts).
        divisor: what a sum is divided by (the world size for an average).
    """
    work = work_dtype(dtype)
    info = np.finfo(work)
    vector = agreed.numpy().astype(np.float64)
    if not np.isfinite(vector).all():
        return Bypass.NON_FINITE
    absmax, relative_to = vector[0], vector[1:]
    blocks = layout.chunks_per_block(0 if quantizer.mode == "abs" else quantizer.block)
    if quantizer.mode == "abs":
        bound = np.array([quantizer.value])
        largest = np.array([absmax])
        typical = largest
    elif quantizer.mode == "rel":
        bound = quantizer.value * relative_to
        largest = typical = relative_to
    else:
        bound = quantizer.value * relative_to
        largest = np.minimum(absmax, np.sqrt(layout.block_lengths(quantizer.block)) * relative_to)
        typical = np.minimum(absmax, 4.0 * relative_to)
    if (largest + bound).max(initial=0.0) * addends / divisor > torch.finfo(dtype).max:
        return Bypass.NON_FINITE
    usable = bound - _ROUNDINGS * float(info.epsneg) / 2 * largest
    # All-zero blocks have bound 0, and a bound under the smallest normal number means nothing: that
    # number is the step then. The cap keeps an absurdly wide absolute bound from becoming infinite.
    with np.errstate(over="ignore"):
        step = _rounded_down(np.clip(2 * usable, float(info.tiny), float(info.max) / 4), work)
    codes = largest / step.astype(np.float64)
    if (usable < bound / 4).any() or addends * (codes.max(initial=0.0) + 1) > _MAX_CODE:
        return Bypass.CODE_OVERFLOW
    bits = np.log2(2 * typical / step.astype(np.float64) + 1) + 1
    if len(bits) and np.average(bits, weights=np.maximum(blocks, 1)) > _WORTH * 8 * dtype.itemsize:
        return Bypass.NOT_WORTH
    per_chunk = np.repeat(step, blocks)
    return Scales(
        inverse_steps=torch.from_numpy(work(1) / per_chunk),
        scales=torch.from_numpy(per_chunk / work(divisor)),
    )


def _rounded_up(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
        return np.where(rounded < values, np.nextafter(rounded, dtype(np.inf)), rounded).astype(dtype)


def _rounded_down(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    rounded = values.astype(dtype)
    return np.where(rounded > values, np.nextafter(rounded, dtype(0)), rounded).astype(dtype)
