"""Checks compression during a training: now and then, one compressed sum is compared with the uncompressed one.

All ranks add up the same figures in the same order. So they find the same result, to the bit, and decide alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import GuardConfig
from ..errors import AccuracyError
from ..messages import say
from ..runtime.statistics import Counters

_PIECE = 1 << 17  # elements that are widened to float64 at a time
_LEAST_TIGHTENING = 2.0**-300  # more than float32 has room for; halved without end it would become zero
_REMEDY = "Set a smaller quantizer.value, in general or by a policy for this tensor, or thresholds in guard that fit"


class Finding(NamedTuple):
    """What one verification found: a compressed sum c beside the uncompressed one u, over all of their elements.

    Attributes:
        name: of the tensor, if it has one.
        relative_error: |c - u| / |u| in L2; 0 if both are zero, inf if only u is zero or c is not finite.
        cosine: c * u / (|c| |u|), from -1 to 1; 1 if both are zero, 0 if only one is or c is not finite.
        alarm: whether a figure is beyond its threshold.
    """

    name: str | None
    relative_error: float
    cosine: float
    alarm: bool

    def describe(self) -> str:
        """A few words for people."""
        name = self.name or "a tensor without a name"
        return f"{name}: relative error {self.relative_error:.3g}, cosine {self.cosine:.3g}"


class Guard:
    """Picks the sums to verify, judges them, and reacts to an alarm as the configuration says.

    Each communicator has one. All ranks of its group must call its methods alike, in the same order.

    Attributes:
        settings: may be replaced between steps, on all ranks alike.
        tightening: what all bounds are multiplied by: 1.0, halved after each step with an alarm where
            `on_alarm` is tighten.
        findings: of the current step.
    """

    def __init__(self, settings: GuardConfig):
        self.tightening = 1.0
        self.findings: list[Finding] = []
        self.settings = settings
        self._step = 0
        self._calls = 1  # compressed sums in the last step that had any
        self._seen = 0  # compressed sums in this step, so far
        self._reports = False  # whether this rank is the one that prints

    def picks(self, step: int, calls_in_step: int) -> bool:
        """Whether this compressed sum is the one to verify in this step.

        Args:
            step: number of the training step, from 0. Every `every`-th step has a verification, the first one too.
            calls_in_step: number of this sum among the compressed sums of this step, from 0.

        Each verification takes the sum after the one that the last verification took, so that each has its turn.
        """
        every = self.settings.every
        if not every:
            return False
        self._step = step
        self._seen = max(self._seen, calls_in_step + 1)
        return step % every == 0 and calls_in_step == step // every % self._calls

    def verify(self, name: str | None, result: Tensor, exact: Tensor, whole: bool, transport) -> Finding | None:
        """Compare a compressed sum with the uncompressed one. All ranks must call this alike; it communicates.

        Args:
            name: of the tensor, if it has one.
            result: what this rank has of the compressed sum, flat and contiguous, of any floating dtype.
            exact: the same elements of the uncompressed sum.
            whole: whether every rank holds all of both sums (all_reduce), rather than a part of its own.
            transport: a transport between all ranks of the group.

        Returns None if the uncompressed sum is not finite in the dtype of `result`, as that is no fault of compression.
        Squares of magnitudes beyond 1e150 are not finite in float64 either.

        Raises PeerError.
        """
        self._reports = transport.rank == 0
        if whole:
            share = _share(result.numel(), transport)
            result, exact = result[share], exact[share]
        figures = _figures(*_over_ranks(_sums(result, exact), transport))
        if figures is None:
            return None
        relative_error, cosine = figures
        alarm = relative_error > self.settings.max_relative_error or cosine < self.settings.min_cosine
        self.findings.append(Finding(name, relative_error, cosine, alarm))
        return self.findings[-1]

    def end_step(self) -> list[Finding]:
        """Close the step, all of whose calls must have finished, and return its findings.

        After an alarm, as `on_alarm` says: prints one line on rank 0, halves `tightening` as well, or raises
        AccuracyError on all ranks.
        """
        findings, self.findings = self.findings, []
        if self._seen:
            self._calls, self._seen = self._seen, 0
        alarms = [finding for finding in findings if finding.alarm]
        if alarms:
            self._answer(f"step {self._step + 1}: " + "; ".join(finding.describe() for finding in alarms))
        return findings

    def state_dict(self) -> dict[str, float | int]:
        """The state that a resumed run needs to go on as if it had not stopped."""
        return {"tightening": self.tightening, "calls": self._calls}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what `state_dict` returned."""
        self.tightening, self._calls = state["tightening"], state["calls"]

    def _answer(self, alarm: str) -> None:
        settings = self.settings
        allowed = f"allowed: at most {settings.max_relative_error:g}, at least {settings.min_cosine:g}"
        if settings.on_alarm == "stop":
            raise AccuracyError(f"{alarm} to the uncompressed sum; {allowed}. {_REMEDY}; or guard.on_alarm: warn")
        if settings.on_alarm == "tighten":
            self.tightening = max(self.tightening / 2, _LEAST_TIGHTENING)
            advice = f"All bounds are now {self.tightening:g} times what they would be"
        else:
            advice = _REMEDY
        if self._reports:
            say(f"ncz_plugins: {alarm} to the uncompressed sum; {allowed}. {advice}")


def _share(numel: int, transport) -> slice:
    """The elements that this rank accounts for, out of `numel` that all ranks hold."""
    rank, world_size = transport.rank, transport.world_size
    return slice(numel * rank // world_size, numel * (rank + 1) // world_size)


def _sums(compressed: Tensor, uncompressed: Tensor) -> Tensor:
    """The float64 sums of (c - u)^2, c^2, u^2 and c * u, in this order; u^2 is inf where c's dtype can't hold u."""
    sums = torch.zeros(4, dtype=torch.float64, device=compressed.device)
    for pieces in zip(compressed.split(_PIECE), uncompressed.split(_PIECE)):
        c, u = (piece.double() for piece in pieces)
        difference, fits = c - u, u.to(compressed.dtype).isfinite().all()
        squares = u.dot(u).where(fits, math.inf)
        sums += torch.stack([difference.dot(difference), c.dot(c), squares, c.dot(u)])
    return sums.cpu()


def _over_ranks(sums: Tensor, transport) -> list[float]:
    """`sums` added up over ranks, to the same bits on each: they exchange all, and add in the order of ranks."""
    table = torch.full((transport.world_size, sums.numel()), -math.inf, dtype=torch.float64, device="cpu")
    table[transport.rank] = sums.nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)  # MAX has no order for NaN
    transport.start_max(table.view(-1), Counters()).wait()
    return [sum(column) for column in table.t().tolist()]


def _figures(difference: float, compressed: float, uncompressed: float, product: float) -> tuple[float, float] | None:
    """Relative error and cosine from the sums of `_sums`; None where the uncompressed sum is not finite."""
    if not math.isfinite(uncompressed):
        return None
    if not math.isfinite(difference + compressed + product):
        return math.inf, 0.0
    if not uncompressed:
        return (math.inf, 0.0) if compressed else (0.0, 1.0)
    relative_error = math.sqrt(difference) / math.sqrt(uncompressed)
    if not compressed:
        return relative_error, 0.0
    return relative_error, max(-1.0, min(1.0, product / math.sqrt(compressed) / math.sqrt(uncompressed)))
