"""Exact results of collectives, errors against them, and whether errors are within the bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...core.codec.fixed_rate import levels_of
from ...core.codec.layout import Layout
from ...core.codec.quantize import smallest_bound
from ...core.config import QuantizerConfig
from ...kernels.format import RATE_BLOCK
from .contenders.collectives import of_torch, send_around
from .job import COLLECTIVES


@dataclass(frozen=True)
class Answer:
    """Exact result on this rank, and the allowed errors.

    Attributes:
        values: exact result, float64, 1-D; empty on a rank that gets none.
        allowed: bound of each block, [blocks], float64; None if the quantizer is lossless.
        starts: first element of each block, [blocks].
    """

    values: Tensor
    allowed: np.ndarray | None
    starts: np.ndarray

    def over(self, result: Tensor, divisor: float = 1) -> float:
        """Largest error of `result` as a share of the bound of its block.

        Args:
            divisor: number by which `result` is smaller than the sum: the number of ranks for averages.
        """
        if not len(self.starts):
            return 0.0
        errors = np.maximum.reduceat((result.double() - self.values / divisor).abs().numpy(), self.starts)
        allowed = np.maximum(self.allowed / divisor, smallest_bound(torch.float32, divisor))
        return float((errors / allowed).max())


def exact(collective: str, x: Tensor, quantizer: QuantizerConfig) -> Answer:
    """Exact result on this rank, whose input is `x`, 1-D. A collective: all ranks must call it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    row, values = COLLECTIVES[collective], _exchanged(collective, x)
    # If each rank has a part, each part starts new blocks.
    lengths = [values.numel() // ranks] * ranks if row.parts else [values.numel()]
    layout = Layout.of(lengths, max(lengths))
    sizes = layout.block_lengths(quantizer.block_in_effect if quantizer.bits is None else RATE_BLOCK)
    starts = np.cumsum(sizes) - sizes
    # The allowed error: the bound of each block, of a sum once for each rank.
    allowed = None
    if quantizer.kind != "lossless":
        measured = _measured((x if row.is_sum else values).double().numpy(), starts, sizes, quantizer)
        if row.is_sum:
            dist.all_reduce(measured, dist.ReduceOp.MAX)
        allowed = _bound(quantizer) * measured.sum(0).numpy() * (ranks if row.is_sum else 1)
    # Cut values and blocks to what this rank gets: all, one part, or nothing.
    if row.parts == "output" or (row.to_root and rank):
        own = layout.segment(rank) if row.parts == "output" else slice(0, 0)
        values = values[own]
        within = (starts + sizes > own.start) & (starts < own.stop) & (own.start < own.stop)
        starts = np.maximum(starts[within] - own.start, 0)
        allowed = None if allowed is None else allowed[within]
    return Answer(values, allowed, starts)


def errors(result: Tensor, answer: Answer, divisor: float) -> tuple[float, float]:
    """Relative L2 error and largest absolute error over all ranks. A collective: all ranks must call it."""
    difference = result.double() - answer.values / divisor
    squares = torch.stack([difference.square().sum(), (answer.values / divisor).square().sum()])
    largest = torch.cat([difference.abs(), difference.new_zeros(1)]).max()
    dist.all_reduce(squares)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    wrong, whole = squares.tolist()
    return (wrong / whole) ** 0.5 if whole else float(wrong > 0), largest.item()


def _bound(quantizer: QuantizerConfig) -> float:
    """Bound in the unit of what `_measured` returns."""
    if quantizer.bits is None:
        return quantizer.value
    step = (1 + 2.0**-7) / levels_of(quantizer.bits)  # magnitudes are rounded up to bfloat16
    return step * ((1 if quantizer.kind_in_effect == "stochastic" else 0.5) + 1e-5)


def _exchanged(collective: str, x: Tensor) -> Tensor:
    """Exact result of the collective, float64, with the parts and the result that only other ranks get."""
    if COLLECTIVES[collective].is_sum:
        values = x.double()
        dist.all_reduce(values)
    elif COLLECTIVES[collective].parts == "input":
        gathered = x.new_empty(x.numel() * dist.get_world_size())
        dist.all_gather(list(gathered.chunk(dist.get_world_size())), x)
        values = gathered.double()
    elif collective == "all_to_all":
        values = torch.empty_like(x)
        dist.all_to_all_single(values, x)
        values = values.double()
    elif collective == "sendrecv":  # the tensor of the rank before
        values = torch.empty_like(x)
        send_around(of_torch(dist.group.WORLD), x, values)
        values = values.double()
    else:
        values = x.clone()
        dist.broadcast(values, 0)
        values = values.double()
    return values


def _measured(x: np.ndarray, starts: np.ndarray, sizes: np.ndarray, quantizer: QuantizerConfig) -> Tensor:
    """Numbers that the bound of each block is relative to, [numbers, blocks].

    Take their maximum over ranks first, then add up the numbers of each block.
    """
    if quantizer.mode == "abs":
        found = [np.ones(len(starts))]
    elif quantizer.mode in ("rel", "bits"):
        found = [np.maximum.reduceat(np.abs(x), starts)]
    elif quantizer.mode == "range":
        found = [np.maximum.reduceat(x, starts), np.maximum.reduceat(-x, starts)]
    else:
        found = [np.sqrt(np.add.reduceat(x * x, starts) / sizes)]
    return torch.from_numpy(np.stack(found))
