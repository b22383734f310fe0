"""From the values of a tensor to the quantization step that all ranks share.

Every rank measures its own values. The ranks agree on the element-wise maximum of these measurements, and each derives
the same quantization steps from it. A maximum is exact, so the order in which ranks are combined does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import GpuBackend, HostBackend
from ...kernels.format import CHUNK, MODES, SCALE_BLOCK, StepRule
from ...kernels.reference.ieee import ieee
from ...kernels.reference.scales import BFLOAT16_ROUNDING, finest, rounded_down, usable_bound
from ..config import QuantizerConfig
from ..errors import ConfigError
from .layout import Layout, Window

# Roundings that the arithmetic may add to the error, each of half a unit in the last place of the largest result: two
# in quantizing (1/step, the product), up to three in dequantizing (int to float, step/n, the product), the rest in
# measuring and here. Reserving them keeps the bound strict; naive code exceeds it by 2% at a bound of 1e-6.
_ROUNDINGS = 6
_WORTHWHILE = 0.9  # expected bits per value, as a share of the plain ones, above which coding is not tried
_SURELY_WORTHWHILE = 0.8  # the same of the block that needs most: then the average need not be known
_STEP_PER_BOUND = {"error_bound": 2, "stochastic": 1}  # rounding at random may be off by a whole step


@dataclass(frozen=True)
class Scales:
    """What turns values into codes and codes into values: one number per SCALE_BLOCK elements, [steps].

    Attributes:
        inverse_steps: 1/step; float64 for float64 tensors, float32 for all others.
        scales: what a summed code is multiplied by: step, or step/n for an average.
    """

    inverse_steps: Tensor
    scales: Tensor

    def __getitem__(self, steps: slice) -> Scales:
        """Some of them, as a view."""
        return Scales(self.inverse_steps[steps], self.scales[steps])


class Derived(NamedTuple):
    """What follows from the measurements that all ranks agreed on.

    Attributes:
        scales: None where values or results are not finite, or codes of the bound asked for would overflow 32 bits.
        finite: whether all values are, and every result must be.
        bits_per_value: roughly what a coded value will take; 0 without scales.
    """

    scales: Scales | None
    finite: bool = True
    bits_per_value: float = 0.0

    def is_worthwhile(self, dtype: torch.dtype) -> bool:
        """Whether codes will take noticeably fewer bits than values of `dtype` do."""
        return self.bits_per_value <= _WORTHWHILE * 8 * dtype.itemsize


def work_dtype(dtype: torch.dtype) -> type[np.floating]:
    """The numpy dtype in which values of `dtype` are quantized."""
    return np.float64 if dtype == torch.float64 else np.float32


def mode_of(quantizer: QuantizerConfig, dtype: torch.dtype) -> str:
    """What is measured, as in `format.MODES`.

    Where blocks are so small that numbers about them cost bytes, ranks agree on one of 16 bits: the root mean square,
    rounded down to bfloat16, so that the bound holds. The largest magnitude of n values is at most sqrt(n) times it.
    """
    small = quantizer.mode == "rms" and 0 < quantizer.block_in_effect < CHUNK and dtype != torch.float64
    return "rms only" if small else quantizer.mode


def smallest_bound(dtype: torch.dtype, divisor: float = 1) -> float:
    """Smaller bounds count as this one. Below it quantization steps and scales of averages would lose digits."""
    # A quarter of the bound is left to the step, see `finest`, and that divided makes the scale.
    return 4 * float(np.finfo(work_dtype(dtype)).tiny) * max(1, divisor)


@lru_cache(maxsize=64)
def step_rule(quantizer: QuantizerConfig, dtype: torch.dtype, addends: int, divisor: float = 1) -> StepRule:
    """The numbers that all blocks of a call share: see `derive`, which takes the same arguments."""
    work, final = np.finfo(work_dtype(dtype)), torch.finfo(dtype)
    return StepRule(
        mode=MODES.index(mode_of(quantizer, dtype)),
        value=quantizer.value,
        addends=addends,
        share=addends / divisor,
        divisor=divisor,
        steps_per_bound=_STEP_PER_BOUND[quantizer.kind_in_effect],
        least=smallest_bound(dtype, divisor),
        reserved=_ROUNDINGS * float(work.epsneg),
        most=final.max,
        rounding=final.eps / 2 if addends == 1 and dtype.itemsize == 2 else 0.0,
        tiny=final.tiny,
        cap=float(work.max) / 4,
    )


def most_summable(quantizer: QuantizerConfig, dtype: torch.dtype, addends: int, divisor: float = 1) -> float:
    """The largest magnitude that a rank's values may have, so that no sum overflows: for `measure`."""
    # The bound is at most that many times the largest magnitude, as a root mean square is not larger.
    return torch.finfo(dtype).max * divisor / addends / (1 + quantizer.value)


def measure(
    backend: HostBackend,
    source: Window,
    layout: Layout,
    segments: range,
    quantizer: QuantizerConfig,
    most: float = math.inf,
    largest: bool = False,
) -> Tensor:
    """This rank's part of the agreement, of values in host memory.

    In mode abs one number, the largest magnitude. Else numbers of each block, so that its step follows from them
    alone, one kind after the other: in rel the largest magnitudes, [blocks]; in rms these and the root mean squares; in
    range the highest values and the lowest ones with the sign changed. They have the dtype that steps have, and are
    rounded up. Of small blocks, see `mode_of`, only the root mean squares, bfloat16.

    Only `segments` are looked at: blocks of others count as zero, or -inf in range, where zero could be a highest
    value. +inf stands for NaN and infinity.

    Args:
        most: larger magnitudes count as infinite where only root mean squares are returned. Else `derive` looks at it.
        largest: return the largest magnitudes of small blocks, too. Known, they allow finer bounds, and no bytes are
            saved by leaving them out where nobody else must know them.
    """
    alone = mode_of(quantizer, source.data.dtype) == "rms only" and not largest
    if alone and quantizer.block_in_effect == SCALE_BLOCK:
        measured = torch.zeros(layout.steps, dtype=torch.bfloat16, device="cpu")
        for i in segments:
            here = measured[layout.steps_of(range(i, i + 1))]
            backend.root_mean_squares(source[layout.segment(i)], most, here)
        return measured
    return _measured(backend, source, layout, segments, quantizer, most, alone)


@ieee
def _measured(
    backend: HostBackend,
    source: Window,
    layout: Layout,
    segments: range,
    quantizer: QuantizerConfig,
    most: float,
    alone: bool,
) -> Tensor:
    """What `measure` returns, from statistics of SCALE_BLOCK elements each. `alone`: only the root mean squares."""
    highest, negated = np.full((2, layout.steps), -np.inf if quantizer.mode == "range" else 0.0)
    squares = np.zeros(layout.steps)
    if segments:
        here = layout.steps_of(segments)
        low, high, total = backend.statistics_of([source[layout.segment(i)] for i in segments]).numpy()
        highest[here], negated[here], squares[here] = high, -low, total
    sizes = layout.steps_per_block(quantizer.block_in_effect)
    first = np.cumsum(sizes) - sizes
    if quantizer.mode == "range":
        measured = [np.maximum.reduceat(highest, first), np.maximum.reduceat(negated, first)]
    else:
        measured = [np.maximum.reduceat(np.maximum(highest, negated), first)]
    if quantizer.mode == "rms":
        lengths = layout.block_lengths(quantizer.block_in_effect)
        mean = np.add.reduceat(squares, first) / lengths
        mean *= 1 - (64 + sizes) * 2.0**-53  # not too large, however the sum was rounded
        # The square of a float64 may overflow, or vanish; the root mean square is this at least.
        at_least = measured[0] / np.sqrt(lengths)
        usable = (mean > 1e-290) & np.isfinite(mean)
        rms = np.maximum(np.sqrt(np.where(usable, mean, 0)), at_least)
        if alone:
            return _rounded_down_to_bfloat16(np.where(measured[0] > most, np.inf, rms))
        measured += [rms]
    return torch.from_numpy(_rounded_up(np.concatenate(measured), work_dtype(source.data.dtype)))


def measured_bytes(layout: Layout, quantizer: QuantizerConfig, dtype: torch.dtype) -> int:
    """The bytes of what `measure` returns."""
    block = quantizer.block_in_effect
    blocks = sum(-(-length // block) for length in layout.lengths) if block else 1
    if mode_of(quantizer, dtype) == "rms only":
        return blocks * torch.bfloat16.itemsize
    kinds = 2 if quantizer.mode in ("rms", "range") else 1
    return blocks * kinds * work_dtype(dtype)().nbytes


def derive(
    agreed: Tensor,
    layout: Layout,
    quantizer: QuantizerConfig,
    dtype: torch.dtype,
    addends: int,
    divisor: float = 1,
    backend: HostBackend | None = None,
) -> Derived:
    """The quantization steps that follow from the agreed vector, and how many bits codes will take.

    Args:
        agreed: element-wise maximum over ranks of what `measure` returned.
        addends: how many ranks' codes are summed (1 for gathers and broadcasts).
        divisor: what a sum is divided by (the world size for an average).
        backend: finds the steps of small blocks faster; they are the same.
    """
    if backend is not None and agreed.dtype == torch.bfloat16 and quantizer.block_in_effect == SCALE_BLOCK:
        *found, spread = backend.steps_of(agreed, step_rule(quantizer, dtype, addends, divisor))
        bits = math.log2(spread) + 1 if spread else math.inf
        if bits <= _SURELY_WORTHWHILE * 8 * dtype.itemsize:
            return Derived(Scales(*found), bits_per_value=bits)
    if torch.isposinf(agreed).any():
        return Derived(None, finite=False)
    return _derived(agreed, layout, quantizer, dtype, addends, divisor)


@ieee
def _derived(
    agreed: Tensor, layout: Layout, quantizer: QuantizerConfig, dtype: torch.dtype, addends: int, divisor: float
) -> Derived:
    """What `derive` returns of finite measurements."""
    work, rule = work_dtype(dtype), step_rule(quantizer, dtype, addends, divisor)
    relative_to, largest, typical = _blocks(agreed, quantizer)
    bound = rule.value * relative_to
    if agreed.dtype != torch.bfloat16 and ((largest + bound) * rule.share > rule.most).any():
        return Derived(None, finite=False)
    bound = np.maximum(bound, rule.least)
    too_fine = bound < finest(largest, rule)
    # The cap keeps an absurdly wide absolute bound from becoming infinite.
    step = rounded_down(np.minimum(rule.steps_per_bound * usable_bound(bound, largest, rule), rule.cap), work)
    if quantizer.mode == "range" and quantizer.kind_in_effect == "error_bound":
        # A block that holds nothing but one value leaves no room for an error, and needs none if that is the step.
        single = too_fine & (relative_to == 0)
        step = np.where(single, largest, step).astype(work)
        too_fine &= ~single
    if too_fine.any():
        return Derived(None)
    counts = layout.steps_per_block(quantizer.block_in_effect)
    bits = np.log2(2 * typical / step.astype(np.float64) + 1) + 1
    steps = np.repeat(step, counts)
    scales = Scales(inverse_steps=torch.from_numpy(work(1) / steps), scales=torch.from_numpy(steps / work(divisor)))
    return Derived(scales, bits_per_value=float(np.average(bits, weights=np.maximum(counts, 1))) if len(bits) else 0.0)


# ------------------------------------------------------------------ the same on a GPU

_ONE_BIT = 1 << 20  # in what the kernel counts


def measure_on_gpu(
    backend: GpuBackend,
    source: Window,
    layout: Layout,
    segments: range,
    quantizer: QuantizerConfig,
    most: float = math.inf,
) -> Tensor:
    """What `measure` returns, on the device."""
    values = [source[layout.segment(segment)] for segment in segments]
    dtype = torch.float64 if source.data.dtype == torch.float64 else torch.float32
    block, mode = quantizer.block_in_effect, mode_of(quantizer, dtype)
    return backend.measure_blocks(values, layout.lengths, segments, block, mode, most, dtype, source.data.device)


def derive_on_gpu(
    backend: GpuBackend, agreed: Tensor, layout: Layout, quantizer: QuantizerConfig, rule: StepRule
) -> tuple[Scales, Tensor]:
    """Scales on the device, and what `derived_on_gpu` takes once the host has seen it."""
    *scales, outcome = backend.derive_steps(agreed, layout.lengths, quantizer.block_in_effect, rule)
    return Scales(*scales), outcome


def derived_on_gpu(scales: Scales, outcome: list[int], layout: Layout) -> Derived:
    """What `derive` returns, of what `derive_on_gpu` does."""
    infinite, too_fine, bits = outcome
    return Derived(None if infinite or too_fine else scales, not infinite, bits / _ONE_BIT / max(1, layout.steps))


# ------------------------------------------------------------------ blocks


@ieee
def smallest_value(agreed: Tensor, quantizer: QuantizerConfig, dtype: torch.dtype) -> float | None:
    """The smallest `quantizer.value` for which `derive`, with one addend, finds steps; None if the mode has none."""
    relative_to, largest, _ = _blocks(agreed, quantizer)
    needs = finest(largest, step_rule(quantizer, dtype, addends=1))
    needed = largest > 0
    if quantizer.kind_in_effect == "error_bound":
        needed &= relative_to > 0  # see the blocks of one value above
    value = np.max(needs[needed] / relative_to[needed], initial=0)
    try:
        return QuantizerConfig(kind=quantizer.kind, mode=quantizer.mode, value=float(value)).value
    except ConfigError:  # more than the mode allows
        return None


def _blocks(agreed: Tensor, quantizer: QuantizerConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per block, [blocks], float64: what the bound is relative to, the largest magnitude, and the usual spread."""
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


def _rounded_up(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    rounded = values.astype(dtype)
    return np.where(rounded < values, np.nextafter(rounded, dtype(np.inf)), rounded).astype(dtype)


def _rounded_down_to_bfloat16(values: np.ndarray) -> Tensor:
    """Of values that are not negative."""
    bits = rounded_down(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return torch.from_numpy(bits.view(np.float32)).bfloat16()
