"""Launches of the kernels that measure blocks and derive quantization steps. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..addresses import require
from ..format import MODES, SCALE_BLOCK, StepRule, blocks_of
from .arguments import MOST_PIECES, integer, runs_table, step_rule_argument
from .frames import THREADS
from .recorded import Recorder

_WARP_THREADS = 32
_WIDE_BLOCK_STEPS = 4096  # from this size on a block gets a thread block, below it a warp
_OUTCOME_NUMBERS = 4  # int64 numbers of ncz::Outcome


class Blocks:
    """Blocks of a tensor that share a scale.

    Args:
        lengths: elements of each segment. Blocks start again in each segment.
        block: elements of a block, a multiple of SCALE_BLOCK; 0: the whole tensor is one block.

    Attributes:
        steps: number of steps of the tensor, one for each SCALE_BLOCK elements.
        count: number of blocks.
    """

    def __init__(self, lengths: Sequence[int], block: int):
        steps = [blocks_of(length) for length in lengths]
        blocks = [-(-length // block) for length in lengths] if block else [1]
        self.steps = sum(steps)
        self.count = sum(blocks)
        self._whole = None if block else sum(lengths)
        self._first_steps = list(accumulate(steps, initial=0))
        self._segments = list(zip(lengths, self._first_steps, steps, accumulate(blocks, initial=0), blocks))
        self._steps_per_block = block // SCALE_BLOCK or max(1, self.steps)

    @property
    def runs(self) -> int:
        """Number of runs that `launch` cuts all segments into."""
        return len(self._segments) if self._whole is None else 1

    def launch(
        self,
        launcher: Recorder,
        kernel: str,
        dtype: torch.dtype,
        segments: range,
        *arguments,
        of_runs: Sequence[Tensor] = (),
    ) -> None:
        """Launch a kernel for the blocks of neighbouring segments. It counts steps from the first segment on.

        Args:
            of_runs: last arguments, which have a row for each run.
        """
        begin, end = self._first_steps[segments.start], self._first_steps[segments.stop]
        runs = [(n, first - begin, *rest) for n, first, *rest in self._segments[segments.start : segments.stop]]
        if self._whole is not None:
            runs = [(self._whole, 0, end - begin, 0, 1)]
        steps = self._steps_per_block
        threads = 1 if steps == 1 else _WARP_THREADS if steps < _WIDE_BLOCK_STEPS else THREADS
        cut = np.int64(steps), integer(threads)
        for start in range(0, len(runs), MOST_PIECES):
            part = runs[start : start + MOST_PIECES]
            most = max(blocks for *_, blocks in part)
            grid = len(part) * max(1, -(-most // (THREADS // threads)))
            rows = [each[start : start + len(part)] for each in of_runs]
            launcher.launch(f"ncz_{kernel}", dtype, grid, THREADS, runs_table(part), *cut, *arguments, *rows)

    @property
    def all(self) -> range:
        """Numbers of all segments."""
        return range(len(self._first_steps) - 1)


def measure(
    launcher: Recorder,
    statistics: Tensor | None,
    blocks: Blocks,
    segments: range,
    mode: str,
    most: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Measures of all blocks on this rank: see `quantize.measure` in core/codec.

    Args:
        statistics: of the elements of `segments`, as `Backend.statistics_of` returns them; None if there are none.
        dtype: dtype of the steps.
    """
    numbers = 2 * blocks.count if mode in ("rms", "range") else blocks.count
    measured_dtype = torch.bfloat16 if mode == "rms only" else dtype
    if segments == blocks.all:
        measured = launcher.empty(numbers, measured_dtype, device)
    else:
        nothing = -torch.inf if mode == "range" else 0.0
        measured = torch.full([numbers], nothing, dtype=measured_dtype, device=device)
    if statistics is not None:
        sizes = np.int64(statistics.shape[1]), np.int64(blocks.count)
        arguments = integer(MODES.index(mode)), np.float64(most), statistics, *sizes, measured
        blocks.launch(launcher, "measure_blocks", dtype, segments, *arguments)
    return measured


def derive(launcher: Recorder, agreed: Tensor, blocks: Blocks, rule: StepRule) -> tuple[Tensor, Tensor, Tensor]:
    """Steps from the maximum of all ranks' measures: see `quantize.derive` in core/codec.

    Returns: inverse steps and scales, [steps] each, and ncz::Outcome of each run as int64, [runs, 4].
    """
    dtype = torch.float32 if agreed.dtype == torch.bfloat16 else agreed.dtype
    mode = MODES[rule.mode]
    measured = torch.bfloat16 if mode == "rms only" else torch.float64 if dtype is torch.float64 else torch.float32
    require(agreed, "agreed", measured, 2 * blocks.count if mode in ("rms", "range") else blocks.count)
    inverse_steps, scales = launcher.empty((2, blocks.steps), dtype, agreed.device).unbind()
    outcomes = launcher.zeros((blocks.runs, _OUTCOME_NUMBERS), torch.int64, agreed.device)
    arguments = step_rule_argument(rule), agreed, np.int64(blocks.count), inverse_steps, scales
    blocks.launch(launcher, "derive_steps", dtype, blocks.all, *arguments, of_runs=[outcomes])
    return inverse_steps, scales, outcomes
