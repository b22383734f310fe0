"""Quantization steps: from the values of a tensor to the steps that all ranks share.

1. `measure`: each rank measures its own values.
2. The ranks agree on the element-wise maximum of these measurements. A maximum is exact in any order of the ranks.
3. `derive`: each rank derives the same quantization steps from the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import GpuBackend, HostBackend
from ...kernels.format import BFLOAT16_ROUNDING, CHUNK, MAX_CODE, MODES, SCALE_BLOCK, StepRule
from ...kernels.ieee import ieee
from ..config import QuantizerConfig
from ..errors import ConfigError
from .layout import Layout, Window

# Roundings of the arithmetic, which the error bound has to allow for. Each adds up to half a unit in the last place of
# the largest result: two in quantizing (1/step, the product), up to three in dequantizing (int to float, step/n, the
# product), the rest in measuring and deriving. Without this reserve the error exceeds a bound of 1e-6 by 2 %.
_ROUNDINGS = 6
# Coding is tried if the expected bits per value are at most this share of the plain bits.
_MAX_SHARE_OF_PLAIN_BITS = 0.9
# If even the block that needs most bits is below this share, `derive` skips the average over blocks.
_MAX_SHARE_IN_WORST_BLOCK = 0.8
_STEPS_PER_BOUND = {"error_bound": 2, "stochastic": 1}  # rounding at random may be off by a whole step


@dataclass(frozen=True)
class Scales:
    """Factors between values and codes, one for each SCALE_BLOCK elements.

    Attributes:
        inverse_steps: 1/step, the factor from values to codes: float64 for float64 tensors, else float32; [steps].
        scales: step/divisor, the factor from summed codes to results; same dtype and shape.
    """

    inverse_steps: Tensor
    scales: Tensor

    def __getitem__(self, steps: slice) -> Scales:
        """A view of some of the factors."""
        return Scales(self.inverse_steps[steps], self.scales[steps])


class Derived(NamedTuple):
    """Result of `derive`, the same on all ranks.

    Attributes:
        scales: None if values or results are not finite, or if codes would overflow 32 bits at the bound asked for.
        finite: whether all values are finite, and all results are sure to be.
        bits_per_value: estimate of the bits that a coded value takes; 0 without scales.
    """

    scales: Scales | None
    finite: bool = True
    bits_per_value: float = 0.0

    def is_worthwhile(self, dtype: torch.dtype) -> bool:
        """Whether codes should take at most 90 % of the bits of plain values of `dtype`."""
        return self.bits_per_value <= _MAX_SHARE_OF_PLAIN_BITS * 8 * dtype.itemsize


def work_dtype(dtype: torch.dtype) -> type[np.floating]:
    """The numpy dtype in which values of `dtype` are quantized."""
    return np.float64 if dtype == torch.float64 else np.float32


def mode_of(quantizer: QuantizerConfig, dtype: torch.dtype) -> str:
    """The statistics that ranks measure, as in `format.MODES`.

    For blocks smaller than CHUNK in mode rms, measurements would take noticeable bytes. So only one number of 16 bits
    is sent for each block: the root mean square, rounded down to bfloat16 so that the bound holds. The largest
    magnitude of n values is at most sqrt(n) times their root mean square.
    """
    small = quantizer.mode == "rms" and 0 < quantizer.block_in_effect < CHUNK and dtype != torch.float64
    return "rms only" if small else quantizer.mode


def smallest_bound(dtype: torch.dtype, divisor: float = 1) -> float:
    """The smallest absolute error bound. Below it, steps and the scales of averages would be subnormal numbers.

    Smaller bounds are raised to this one.
    """
    # The step is at least a quarter of the bound, see `_finest_bounds`. Divided by `divisor` it makes the scale.
    return 4 * float(np.finfo(work_dtype(dtype)).tiny) * max(1, divisor)


@lru_cache(maxsize=64)
def step_rule(
    quantizer: QuantizerConfig,
    dtype: torch.dtype,
    addends: int,
    divisor: float = 1,
    result: torch.dtype | None = None,
) -> StepRule:
    """The constants for deriving steps, which all blocks of a call share. For the arguments see `derive`."""
    work, final = np.finfo(work_dtype(dtype)), torch.finfo(dtype)
    return StepRule(
        mode=MODES.index(mode_of(quantizer, dtype)),
        value=quantizer.value,
        addends=addends,
        share=addends / divisor,
        divisor=divisor,
        steps_per_bound=_STEPS_PER_BOUND[quantizer.kind_in_effect],
        least=smallest_bound(dtype, divisor),
        reserved=_ROUNDINGS * float(work.epsneg),
        most=torch.finfo(result or dtype).max,
        rounding=final.eps / 2 if addends == 1 and dtype.itemsize == 2 else 0.0,
        tiny=final.tiny,
        cap=float(work.max) / 4,
    )


def most_summable(quantizer: QuantizerConfig, dtype: torch.dtype, addends: int, divisor: float = 1) -> float:
    """The largest magnitude of a rank's values with which no sum of `dtype` can overflow: `most` of `measure`."""
    # A value may come out larger by the bound, which is at most `quantizer.value` times the largest magnitude.
    return torch.finfo(dtype).max * divisor / addends / (1 + quantizer.value)


@ieee
def measure(
    backend: HostBackend,
    source: Window,
    layout: Layout,
    segments: Sequence[int],
    quantizer: QuantizerConfig,
    most: float = math.inf,
    largest: bool = False,
) -> Tensor:
    """Measure values in host memory, for the ranks to agree on. On a GPU: `measure_on_gpu`.

    Returns, by mode:

    - abs: the largest magnitude of the tensor, [1].
    - rel: the largest magnitude of each block, [blocks].
    - rms: the largest magnitudes, then the root mean squares, [2 * blocks].
    - range: the highest values, then the negated lowest values, [2 * blocks].
    - "rms only", see `mode_of`: the root mean squares, bfloat16, [blocks].

    In the first four modes the dtype is that of steps, and numbers are rounded up. NaN and infinity measure +inf.

    Args:
        segments: the segments to measure, a range unless `measures_each_block`. Blocks of other segments measure 0, or
            -inf in mode range.
        most: in mode "rms only", larger magnitudes measure +inf. In other modes `derive` finds them.
        largest: return the largest magnitudes even in mode "rms only". They allow finer bounds, and cost nothing if
            the measurements are not sent to other ranks.
    """
    if measures_each_block(quantizer, source.data.dtype) and not largest:
        measured = torch.zeros(layout.steps, dtype=torch.bfloat16, device="cpu")
        for i in segments:
            here = measured[layout.steps_of(range(i, i + 1))]
            backend.root_mean_squares(source[layout.segment(i)], most, here)
        return measured

    # Statistics of each SCALE_BLOCK elements.
    highest, negated = np.full((2, layout.steps), -np.inf if quantizer.mode == "range" else 0.0)
    squares = np.zeros(layout.steps)
    if segments:
        here = layout.steps_of(segments)
        low, high, total = backend.statistics_of([source[layout.segment(i)] for i in segments]).numpy()
        highest[here], negated[here], squares[here] = high, -low, total

    # Maxima of each block.
    sizes = layout.steps_per_block(quantizer.block_in_effect)
    first = np.cumsum(sizes) - sizes
    if quantizer.mode == "range":
        measured = [np.maximum.reduceat(highest, first), np.maximum.reduceat(negated, first)]
    else:
        measured = [np.maximum.reduceat(np.maximum(highest, negated), first)]

    # Root mean squares of each block.
    if quantizer.mode == "rms":
        lengths = layout.block_lengths(quantizer.block_in_effect)
        mean = np.add.reduceat(squares, first) / lengths
        mean *= 1 - (64 + sizes) * 2.0**-53  # so that rounding in the sum has not made it too large
        # Squares of float64 may overflow or vanish. The root mean square is then replaced by its lower limit.
        usable = (mean > 1e-290) & np.isfinite(mean)
        rms = np.maximum(np.sqrt(np.where(usable, mean, 0)), measured[0] / np.sqrt(lengths))
        if mode_of(quantizer, source.data.dtype) == "rms only" and not largest:
            return _rounded_down_to_bfloat16(np.where(measured[0] > most, np.inf, rms))
        measured += [rms]
    return torch.from_numpy(_rounded_up(np.concatenate(measured), work_dtype(source.data.dtype)))


def measured_bytes(layout: Layout, quantizer: QuantizerConfig, dtype: torch.dtype) -> int:
    """Bytes of the tensor that `measure` returns."""
    block = quantizer.block_in_effect
    blocks = sum(-(-length // block) for length in layout.lengths) if block else 1
    if mode_of(quantizer, dtype) == "rms only":
        return blocks * torch.bfloat16.itemsize
    numbers_of_block = 2 if quantizer.mode in ("rms", "range") else 1
    return blocks * numbers_of_block * work_dtype(dtype)().nbytes


def measures_each_block(quantizer: QuantizerConfig, dtype: torch.dtype) -> bool:
    """Whether `measure` returns one number for each SCALE_BLOCK elements, as by default: one pass of the kernels."""
    return mode_of(quantizer, dtype) == "rms only" and quantizer.block_in_effect == SCALE_BLOCK


def derive_at_once(agreed: Tensor, dtype: torch.dtype, rule: StepRule, backend: HostBackend) -> Derived | None:
    """What `derive` returns for measurements of each block: by one pass of the kernels, and for any of the blocks.

    None if a block is not finite, or needs a finer step or many bits: `derive` tells what that means for all of them.
    """
    *found, spread = backend.steps_of(agreed, rule)
    bits = math.log2(spread) + 1 if spread else math.inf
    is_clear = bits <= _MAX_SHARE_IN_WORST_BLOCK * 8 * dtype.itemsize
    return Derived(Scales(*found), bits_per_value=bits) if is_clear else None


@ieee
def derive(
    agreed: Tensor,
    layout: Layout,
    quantizer: QuantizerConfig,
    dtype: torch.dtype,
    addends: int,
    divisor: float = 1,
    backend: HostBackend | None = None,
    result: torch.dtype | None = None,
) -> Derived:
    """Derive quantization steps from the measurements of all ranks, and estimate the bits that codes take.

    Args:
        agreed: element-wise maximum over ranks of the tensors that `measure` returned.
        dtype: dtype of the values.
        addends: number of ranks whose codes are summed; 1 for gathers and broadcasts.
        divisor: sums are divided by it; the number of ranks for an average.
        backend: kernels that derive the steps of small blocks faster; the steps are the same. None: numpy.
        result: dtype of results, which must not overflow; None: that of the values.
    """
    work, rule = work_dtype(dtype), step_rule(quantizer, dtype, addends, divisor, result)

    if backend is not None and agreed.dtype == torch.bfloat16 and quantizer.block_in_effect == SCALE_BLOCK:
        if found := derive_at_once(agreed, dtype, rule, backend):
            return found

    # The error bound of each block.
    if torch.isposinf(agreed).any():
        return Derived(None, finite=False)
    relative_to, largest, typical = _blocks(agreed, quantizer)
    bound = rule.value * relative_to
    if agreed.dtype != torch.bfloat16 and ((largest + bound) * rule.share > rule.most).any():
        return Derived(None, finite=False)
    bound = np.maximum(bound, rule.least)

    # The step of each block. The cap keeps a huge absolute bound from becoming an infinite step.
    too_fine = bound < _finest_bounds(largest, rule)
    step = _rounded_down(np.minimum(rule.steps_per_bound * _usable_bounds(bound, largest, rule), rule.cap), work)
    if quantizer.mode == "range" and quantizer.kind_in_effect == "error_bound":
        # All values of such a block are equal, so the bound is 0. With that value as the step the code is exact.
        single = too_fine & (relative_to == 0)
        step = np.where(single, largest, step).astype(work)
        too_fine &= ~single
    if too_fine.any():
        return Derived(None)

    # Steps of each SCALE_BLOCK elements, and the estimate of bits.
    counts = layout.steps_per_block(quantizer.block_in_effect)
    bits = np.log2(2 * typical / step.astype(np.float64) + 1) + 1
    steps = np.repeat(step, counts)
    scales = Scales(inverse_steps=torch.from_numpy(work(1) / steps), scales=torch.from_numpy(steps / work(divisor)))
    return Derived(scales, bits_per_value=float(np.average(bits, weights=np.maximum(counts, 1))) if len(bits) else 0.0)


# ------------------------------------------------------------------ on a GPU

_ONE_BIT = 1 << 20  # the kernel counts bits in units of 2**-20
OUTCOME_NUMBERS = 4  # of a segment: see `GpuBackend.derive_steps`


def measure_on_gpu(
    backend: GpuBackend,
    source: Window,
    layout: Layout,
    segments: range,
    quantizer: QuantizerConfig,
    most: float = math.inf,
    block: int | None = None,
) -> Tensor:
    """Measure values on a GPU. For arguments and result see `measure`; the result is on the GPU.

    Args:
        block: elements that share a scale; None: as the quantizer says.
    """
    values = [source[layout.segment(segment)] for segment in segments]
    dtype = torch.float64 if source.data.dtype == torch.float64 else torch.float32
    block, mode = quantizer.block_in_effect if block is None else block, mode_of(quantizer, dtype)
    return backend.measure_blocks(values, layout.lengths, segments, block, mode, most, dtype, source.data.device)


def derive_on_gpu(
    backend: GpuBackend,
    agreed: Tensor,
    layout: Layout,
    quantizer: QuantizerConfig,
    rule: StepRule,
    block: int | None = None,
) -> tuple[Scales, Tensor]:
    """Derive quantization steps on a GPU, without a wait of the host.

    Returns the scales, valid only if `derived_on_gpu` says so, and the outcome for `derived_on_gpu`: int64,
    OUTCOME_NUMBERS of each segment, or of the whole tensor if that shares a scale. Both are on the GPU.

    Args:
        agreed: see `derive`; on the GPU.
        rule: see `step_rule`.
        block: see `measure_on_gpu`.
    """
    block = quantizer.block_in_effect if block is None else block
    *scales, outcome = backend.derive_steps(agreed, layout.lengths, block, rule)
    return Scales(*scales), outcome.view(-1)


def derived_on_gpu(scales: Scales | None, outcome: Sequence[int], steps: int) -> Derived:
    """The result of `derive_on_gpu`, once the host has the outcome: see `derive`.

    Args:
        outcome: of all segments, or of one.
        steps: quantization steps of the same segments.
    """
    infinite, too_fine, bits = [sum(outcome[number::OUTCOME_NUMBERS]) for number in range(3)]
    return Derived(None if infinite or too_fine else scales, not infinite, bits / _ONE_BIT / max(1, steps))


# ------------------------------------------------------------------ blocks


@ieee
def smallest_value(agreed: Tensor, quantizer: QuantizerConfig, dtype: torch.dtype) -> float | None:
    """The smallest `quantizer.value` for which `derive` finds steps with one addend; None if the mode allows none.

    Args:
        agreed: see `derive`.
        dtype: dtype of the values.
    """
    relative_to, largest, _ = _blocks(agreed, quantizer)
    finest_bounds = _finest_bounds(largest, step_rule(quantizer, dtype, addends=1))
    needed = largest > 0
    if quantizer.kind_in_effect == "error_bound":
        needed &= relative_to > 0  # blocks of equal values need no bound: see `derive`
    value = np.max(finest_bounds[needed] / relative_to[needed], initial=0)
    try:
        return QuantizerConfig(kind=quantizer.kind, mode=quantizer.mode, value=float(value)).value
    except ConfigError:  # larger than the mode allows
        return None


def _blocks(agreed: Tensor, quantizer: QuantizerConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three numbers of each block, each float64, [blocks].

    Returns the number that the bound is relative to, the largest magnitude, and the typical spread of values.
    """
    vector = agreed.double().numpy()
    if quantizer.mode == "abs":
        return np.ones(1), vector, vector
    if quantizer.mode == "rel":
        return vector, vector, vector
    if agreed.dtype == torch.bfloat16:
        largest = vector * (quantizer.block_in_effect**0.5 * BFLOAT16_ROUNDING)
        return vector, largest, np.minimum(largest, 4.0 * vector)
    if quantizer.mode == "rms":
        absmax, rms = vector.reshape(2, -1)
        return rms, absmax, np.minimum(absmax, 4.0 * rms)
    highest, negated = np.where(np.isneginf(vector), 0, vector).reshape(2, -1)
    extent = highest + negated
    return extent, np.maximum(np.abs(highest), np.abs(negated)), extent


def _finest_bounds(largest: np.ndarray, rule: StepRule) -> np.ndarray:
    """Smallest bound of each block that leaves a quarter of itself to the step, and whose codes don't overflow."""
    reserved = rule.reserved
    usable = rule.addends * (largest / (MAX_CODE - rule.addends)) / rule.steps_per_bound
    return np.maximum(reserved * largest / (0.75 - reserved), (reserved * largest + usable) / (1 - reserved))


def _usable_bounds(bound: np.ndarray, largest: np.ndarray, rule: StepRule) -> np.ndarray:
    """Part of each bound that is left after the roundings of the arithmetic."""
    usable = bound - rule.reserved * (largest + bound)
    if not rule.rounding:
        return usable
    # Reserve the rounding of the result as well. It at most doubles a small error, because the result's inputs have the
    # same dtype.
    rounding = rule.rounding * np.maximum(largest + bound, rule.tiny)
    return np.maximum(usable - rounding, usable / 2)


def _rounded_down(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Non-negative values, rounded down to a dtype that may hold fewer digits."""
    rounded = values.astype(dtype)
    return np.where(rounded > values, np.nextafter(rounded, dtype(0)), rounded).astype(dtype)


def _rounded_up(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Values rounded up to a dtype that may hold fewer digits."""
    rounded = values.astype(dtype)
    return np.where(rounded < values, np.nextafter(rounded, dtype(np.inf)), rounded).astype(dtype)


def _rounded_down_to_bfloat16(values: np.ndarray) -> Tensor:
    """Round values that are not negative down to bfloat16."""
    bits = _rounded_down(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return torch.from_numpy(bits.view(np.float32)).bfloat16()
