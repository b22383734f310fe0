"""Quantizers of gradients that were tried, in plain torch: those that this library has, and those that it might have.

All keep what it needs: one quantization step for all ranks, so that integers can be added. They differ in what the step
is relative to, and in how values are rounded. All ranks' gradients are in one process here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from optimizers import is_of_muon
from torch import Tensor

BLOCK = 4096  # elements that share a scale by default
BF16, FP32 = 16, 32  # bits of a scale that ranks agree on
HISTORY = 0.95  # how much of the mean square of earlier sums is kept
HISTORY_STEPS = 5  # before that is used
NUDGE = 1e-6  # how much of a value a nudge changes
EMBEDDINGS = ("tokens", "positions")  # what their names start with; the head is the first, transposed
LEAST_OF_BLOCK = 0.02  # a scale from history is at least this part of the block's
MEASURE_EVERY, FIRST_MEASURED = 20, 10
MOMENTUM = 0.95  # of the sums, in whose singular vectors matrices are coded: Muon's own by default
FIRST_ROTATED = 10  # calls before that
LEAST_TILT = 0.02  # a singular value counts as at least this times the root mean square of all


class Candidate(NamedTuple):
    """One way to average gradients.

    Attributes:
        rounding: "plain" and "bf16" round no codes; nor does "nudged", which changes each value by up to a millionth,
            to show what chance does to a training; "nearest"; "random", up or down, without bias; "strata", random
            with one number u for all ranks, rank r of n rounding with (u + r/n) mod 1, so that errors of equal values
            cancel in the sum; "near zero" and "strata near zero", like that between -1 and 1 only, where rounding to
            nearest has its bias.
        scale: what the step is relative to: the root mean square of a "block", of a "row" of a parameter (of its first
            index), of "rows and columns" (their product, as Adafactor has it: Shazeer and Stern, 2018), or of each
            element's own "history" of sums, which all ranks know.
        step: times that scale.
        block: elements of a block.
        feedback: how much of what rounding lost is added to the next gradient: 1 is error feedback (Seide et al.,
            2014), 0.8 decays (LoCo, arXiv 2407.04480).
        kept_in: bits of each number that feedback keeps: 16 is bfloat16, 8 an integer times a scale for its block; 0 is
            float32.
        octave: scales are rounded up to 2 to the power of n/octave, which 8 bits can say; 0 is for bfloat16.
        last: the finished sum is rounded again, to steps that are this times the square root of the ranks; 0: not.
        apart: which parameters are treated apart, as by a policy: "vectors", which have one dimension, "embeddings", or
            both in one string; "rest" is all but the matrices that Muon trains.
        apart_step: the step of these; 0 leaves them uncompressed. The rest is rounded by the default.
        rotated: every so many calls matrices get a new basis to be coded in, see Rotation; 0: never.
        tilt: in that basis, steps follow singular values to this power, and one scale serves all of a matrix: its
            root mean square. 0: as `scale` says.
        sides: 2 rotates both sides of a matrix, 1 the shorter one.
    """

    rounding: str
    scale: str = ""
    step: float = 0.0
    block: int = BLOCK
    feedback: float = 0.0
    kept_in: int = 0
    octave: int = 0
    last: float = 0.0
    apart: str = ""
    apart_step: float = 0.0
    rotated: int = 0
    tilt: float = 0.0
    sides: int = 1

    def describe(self) -> str:
        """A few words: "random, block of 256, 0.5"."""
        if not self.scale:
            return self.rounding
        scale = f"block of {self.block}" if self.scale == "block" else self.scale
        more = {"feedback": self.feedback, "kept in": self.kept_in, "octave": self.octave, "last": self.last}
        more |= {"rotated every": self.rotated, "tilt": self.tilt}
        more |= {"sides": self.sides} if self.sides > 1 else {}
        extra = "".join(f", {name} {value:g}" for name, value in more.items() if value)
        if self.apart:
            extra += f", {self.apart} {f'{self.apart_step:g}' if self.apart_step else 'uncompressed'}"
        return f"{self.rounding}, {scale}, {self.step:g}{extra}"

    def treats_apart(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter is one of those."""
        if self.apart == "rest":
            return not is_of_muon(name, shape)
        vector = "vectors" in self.apart and len(shape) == 1
        return vector or ("embeddings" in self.apart and name.startswith(EMBEDDINGS))

    def of_those(self) -> Candidate:
        """What is done to these."""
        if not self.apart_step:
            return Candidate("plain")
        if self.apart == "rest":
            return Candidate("strata", "block", self.apart_step, self.block)
        return self._replace(step=self.apart_step, apart="", apart_step=0.0)


class Quantizer:
    """Averages gradients as a candidate does, and measures what it would send.

    Args:
        shapes: of the parameters whose gradients lie one behind the other.
        seed: of the random numbers.
        names: of the parameters, where a candidate asks for them.

    Attributes:
        bits: per value, in every 20th call: the mean of the entropy of what travels to the owner of a sum, the partial
            sums of a ring, and of the finished sum; and the scales.
    """

    def __init__(self, candidate: Candidate, shapes: list[tuple[int, ...]], seed: int, names: Sequence[str] = ()):
        self.candidate = candidate
        self.shapes = shapes
        self._parts: list[tuple[Tensor, Quantizer]] = []  # each with the places of its elements
        if candidate.apart:
            named = list(zip_longest(names, shapes, fillvalue=""))
            apart = [candidate.treats_apart(name, shape) for name, shape in named]
            sizes = torch.tensor([math.prod(shape) for shape in shapes])
            for whether, how in ((False, candidate._replace(apart="", apart_step=0.0)), (True, candidate.of_those())):
                places = (torch.tensor(apart).repeat_interleave(sizes) == whether).nonzero()[:, 0]
                part = [shape for shape, is_apart in zip(shapes, apart) if is_apart == whether]
                if part:
                    self._parts.append((places, Quantizer(how, part, seed + whether)))
        self.bits: list[float] = []
        self._rotation = Rotation(shapes, candidate) if candidate.rotated else None
        self._generator = torch.Generator().manual_seed(seed)
        self._calls = 0
        self._squares: Tensor | None = None  # running mean of squared sums
        self._residuals: list[Tensor] | None = None

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        """The average over ranks of float32 tensors, [elements] each."""
        candidate, n = self.candidate, len(gradients)
        if self._parts:
            return self._by_parts(gradients)
        if candidate.rounding == "plain":
            return torch.stack(gradients).mean(0)
        if candidate.rounding == "nudged":
            mean = torch.stack(gradients).mean(0)
            return mean * (1 + NUDGE * (2 * self._random(mean) - 1))
        if candidate.rounding == "bf16":
            return (sum(each.bfloat16() for each in gradients) / n).float()
        if candidate.feedback:
            self._residuals = self._residuals or [torch.zeros_like(each) for each in gradients]
            gradients = [each + residual for each, residual in zip(gradients, self._residuals)]
        if self._rotation:
            gradients = [self._rotation.into(each) for each in gradients]
        scale, scale_bits = self._scale(gradients)
        step = (candidate.step * scale).clamp_min(1e-30)
        codes = self._rounded([each / step for each in gradients])
        if candidate.feedback:
            lost = [candidate.feedback * (g - c * step) for g, c in zip(gradients, codes)]
            if self._rotation:
                lost = [self._rotation.back(each) for each in lost]  # the next call may have another basis
            self._residuals = [self._kept(each) for each in lost]
        total, factor = self._rounded_again(sum(codes), n)
        if self._calls % MEASURE_EVERY == FIRST_MEASURED:
            partial = torch.stack(codes[:-1]).cumsum(0)
            self.bits.append((sum(map(entropy, partial)) / (n - 1) + entropy(total)) / 2 + scale_bits)
        result = total * (factor * step / n)
        if self._rotation:
            result = self._rotation.back(result)
            self._rotation.follow(result)
        if candidate.scale == "history":
            squares = n * result * result  # about those of one rank
            before = torch.zeros_like(squares) if self._squares is None else self._squares
            self._squares = HISTORY * before + (1 - HISTORY) * squares
        self._calls += 1
        return result

    def _by_parts(self, gradients: list[Tensor]) -> Tensor:
        """Some parameters apart from the others."""
        result = torch.empty_like(gradients[0])
        for places, quantizer in self._parts:
            result[places] = quantizer([each[places] for each in gradients])
        if all(quantizer.bits or quantizer.candidate.rounding == "plain" for _, quantizer in self._parts):
            used = [places.numel() * (quantizer.bits or [FP32])[-1] for places, quantizer in self._parts]
            self.bits.append(sum(used) / result.numel())
        return result

    def _kept(self, residual: Tensor) -> Tensor:
        """What is left of a residual in as many bits as it is kept in."""
        if self.candidate.kept_in == 0:
            return residual
        if self.candidate.kept_in == BF16:
            return residual.bfloat16().float()
        block, numel = self.candidate.block, residual.numel()
        blocks = F.pad(residual, (0, -numel % block)).view(-1, block)
        step = (blocks.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
        return ((blocks / step).round() * step).view(-1)[:numel]

    # ------------------------------------------------------------------ rounding

    def _random(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self._generator).to(like.device)

    def _rounded(self, values: list[Tensor]) -> list[Tensor]:
        rounding, n = self.candidate.rounding, len(values)
        if rounding == "nearest":
            return [each.round() for each in values]
        if rounding.startswith("strata"):
            shared = self._random(values[0])
            at_random = [(shared + rank / n).frac_().add_(each).floor_() for rank, each in enumerate(values)]
        else:
            at_random = [(each + self._random(each)).floor() for each in values]
        if rounding.endswith("near zero"):
            return [torch.where(each.abs() < 1, c, each.round()) for each, c in zip(values, at_random)]
        return at_random

    def _rounded_again(self, total: Tensor, n: int) -> tuple[Tensor, int]:
        """The finished sum in wider steps, and how many steps these are."""
        factor = max(1, round(self.candidate.last * math.sqrt(n)))
        if factor == 1:
            return total, 1
        if self.candidate.rounding == "nearest":
            return (total / factor).round(), factor
        return (total / factor + self._random(total)).floor(), factor

    # ------------------------------------------------------------------ scales

    def _scale(self, gradients: list[Tensor]) -> tuple[Tensor, float]:
        """What steps are relative to, the same on all ranks, [elements], and the bits that agreeing on it takes."""
        candidate, numel = self.candidate, gradients[0].numel()
        if candidate.tilt and self._rotation and self._rotation.bases:
            return self._rotation.tilted(gradients), FP32 * len(self.shapes) / numel
        if candidate.scale in ("block", "history"):
            scale, numbers = self._by_block(gradients), -(-numel // candidate.block)
        else:
            scale, numbers = self._by_parameter(gradients)
        if candidate.scale == "history" and self._calls >= HISTORY_STEPS:
            scale = (self._squares / (1 - HISTORY**self._calls)).sqrt().clamp_min(LEAST_OF_BLOCK * scale)
        if candidate.octave:
            exponent = (scale.clamp_min(1e-30).log2() * candidate.octave).ceil()
            scale = (exponent / candidate.octave).exp2()
        each = 8 if candidate.octave else BF16 if candidate.block < BLOCK else FP32
        return scale, each * numbers / numel

    def _by_block(self, gradients: list[Tensor]) -> Tensor:
        block, numel = self.candidate.block, gradients[0].numel()
        sums = [F.pad(each * each, (0, -numel % block)).view(-1, block).sum(1) for each in gradients]
        counts = torch.full_like(sums[0], block)
        counts[-1] -= -numel % block
        return (torch.stack(sums).amax(0) / counts).sqrt()[:, None].expand(-1, block).reshape(-1)[:numel]

    def _by_parameter(self, gradients: list[Tensor]) -> tuple[Tensor, int]:
        """By rows, or by rows and columns; and how many numbers these are."""
        found, numbers, first = [], 0, 0
        for shape in self.shapes:
            numel = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            squares = torch.stack([each[first : first + numel].view(rows, -1) ** 2 for each in gradients])
            by_row = squares.mean(2).amax(0)
            if self.candidate.scale == "row" or rows == 1 or rows == numel:
                found.append(by_row.sqrt().repeat_interleave(numel // rows))
                numbers += rows
            else:
                by_column = squares.mean(1).amax(0)
                found.append((by_row[:, None] * by_column / by_row.mean().clamp_min(1e-38)).sqrt().view(-1))
                numbers += rows + numel // rows
            first += numel
        return torch.cat(found), numbers


class Rotation:
    """Matrices in the basis of the singular vectors of a momentum of their sums, which all ranks have.

    Noise that is equal in all elements drowns the small singular values of a gradient, and Muon makes all values equal.
    In this basis, of the shorter side of a matrix, each row belongs to one singular value.

    The library's `core/training/rotation.py` has one of these ways, with integers, and with bases after other sums.

    Args:
        shapes: of the matrices, one behind the other, [elements] in all.
        candidate: how often there is a new basis, of which sides, and how steps follow singular values.

    Attributes:
        bases: for each matrix that of its shorter and of its longer side, [side, directions], the largest singular
            value first; none in the first calls, and None for a side that stays as it is.
    """

    def __init__(self, shapes: list[tuple[int, ...]], candidate: Candidate):
        self.shapes, self.candidate = shapes, candidate
        self.bases: list[tuple[Tensor, Tensor | None]] = []
        self._tilts: list[Tensor] = []  # [shorter side, longer side or 1], with a geometric mean of 1
        self._sizes = [math.prod(shape) for shape in shapes]
        self._momentum: Tensor | float = 0.0
        self._calls = 0

    def into(self, flat: Tensor) -> Tensor:
        """[elements], of each matrix one direction after the other."""
        if not self.bases:
            return flat
        turned = [basis.T @ each for (basis, _), each in zip(self.bases, self._wide(flat))]
        turned = [each if other is None else each @ other for (_, other), each in zip(self.bases, turned)]
        return torch.cat([each.flatten() for each in turned])

    def back(self, flat: Tensor) -> Tensor:
        """What `into` was given."""
        if not self.bases:
            return flat
        found = []
        for shape, (basis, other), rows in zip(self.shapes, self.bases, flat.split(self._sizes)):
            wide = basis @ rows.view(len(basis), -1)
            wide = wide if other is None else wide @ other.T
            found.append((wide.T if shape[0] > shape[1] else wide).flatten())
        return torch.cat(found)

    def tilted(self, gradients: list[Tensor]) -> Tensor:
        """What steps are relative to, [elements]: one number of each matrix, times what its directions are worth."""
        found = []
        for tilt, *parts in zip(self._tilts, *(each.split(self._sizes) for each in gradients)):
            largest = torch.stack([part.square().mean() for part in parts]).amax().sqrt()
            found.append((largest * tilt).expand(-1, parts[0].numel() // len(tilt)).flatten())
        return torch.cat(found)

    def follow(self, total: Tensor) -> None:
        """Learn from a sum, and make new bases when it is time."""
        self._momentum = MOMENTUM * self._momentum + (1 - MOMENTUM) * total
        self._calls += 1
        if self._calls < FIRST_ROTATED or (self.bases and self._calls % self.candidate.rotated):
            return
        self.bases, self._tilts = [], []
        for matrix in self._wide(self._momentum):
            basis, values = _singular(matrix)
            other, others = _singular(matrix.T) if self.candidate.sides > 1 else (None, torch.zeros_like(values[:1]))
            worth = (values[:, None] + others) / values.square().mean().sqrt().clamp_min(1e-30)
            tilt = (worth + LEAST_TILT) ** self.candidate.tilt
            self.bases.append((basis, other))
            self._tilts.append(tilt / tilt.log().mean().exp())

    def _wide(self, flat: Tensor) -> list[Tensor]:
        """Each matrix with its shorter side first."""
        matrices = [each.view(shape) for each, shape in zip(flat.split(self._sizes), self.shapes)]
        return [each.T if each.shape[0] > each.shape[1] else each for each in matrices]


def _singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors, [rows, rows], and the values, from large to small."""
    squares, basis = torch.linalg.eigh(matrix @ matrix.T)
    return basis.flip(1), squares.flip(0).clamp_min(0).sqrt()


def entropy(codes: Tensor) -> float:
    """Bits per code of an ideal coder that knows how frequent each code is, and no more."""
    counts = torch.bincount((codes - codes.min()).long().clamp_max(1 << 16)).double()
    share = counts[counts > 0] / counts.sum()
    return -(share * share.log2()).sum().item()
