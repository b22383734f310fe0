"""Guard of a training: verifies one compressed sum every few steps against the uncompressed sum.

All ranks add the same numbers in the same order, get the same bits, and so decide alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import GuardConfig
from ..errors import AccuracyError
from ..messages import say
from ..reasons import SMALLER_BOUND
from ..runtime.statistics import Counters

_PIECE_ELEMENTS = 1 << 17  # elements converted to float64 at a time
_MIN_TIGHTENING = 2.0**-300  # keeps repeated halving from reaching zero; far below what float32 can hold
_REMEDY = f"{SMALLER_BOUND[0].upper()}{SMALLER_BOUND[1:]}, or raise guard.max_relative_error"


class Finding(NamedTuple):
    """Result of one verification: a compressed sum c compared with the uncompressed sum u, over all elements.

    Attributes:
        name: name of the tensor; None if it has none.
        relative_error: |c - u| / |u| in L2; 0 if both are zero, inf if only u is zero or c is not finite.
        cosine: c * u / (|c| |u|), from -1 to 1; 1 if both are zero, 0 if one of them is zero or c is not finite.
        alarm: whether the relative error is above its threshold.
    """

    name: str | None
    relative_error: float
    cosine: float
    alarm: bool

    def describe(self) -> str:
        """The finding in a few words."""
        name = self.name or "a tensor without a name"
        return f"{name}: relative error {self.relative_error:.3g}, cosine {self.cosine:.3g}"


class Guard:
    """Verifier of one process group: picks the sums to verify, compares them, and acts on alarms.

    All ranks of the group must make the same calls of its methods, in the same order.

    Attributes:
        settings: may be replaced between steps, on all ranks alike.
        tightening: factor on all error bounds. Starts at 1.0, and is halved after each step with an alarm if
            `on_alarm` is tighten.
        findings: findings of the current step.
        sums: compressed sums in this step so far.
    """

    def __init__(self, settings: GuardConfig):
        self.tightening = 1.0
        self.findings: list[Finding] = []
        self.sums = 0
        self.settings = settings
        self._step = 0
        self._calls = 1  # compressed sums in the last step that had any
        self._prints = False  # whether this is the rank that prints alarms

    def picks(self, step: int) -> bool:
        """Whether to verify the next compressed sum. Call this once for each compressed sum.

        Sums take turns: each verification takes the sum after the one that the previous verification took.

        Args:
            step: number of the training step, from 0. Steps 0, `every`, 2 * `every` ... verify one sum each.
        """
        number, every = self.sums, self.settings.every
        self.sums += 1
        self._step = step
        return every > 0 and step % every == 0 and number == step // every % self._calls

    def verify(self, name: str | None, result: Tensor, exact: Tensor, whole: bool, transport) -> Finding | None:
        """Compare a compressed sum with the uncompressed one. A collective: all ranks must call it.

        Args:
            name: name of the tensor; None if it has none.
            result: this rank's elements of the compressed sum, 1-D and contiguous, any floating dtype.
            exact: the same elements of the uncompressed sum.
            whole: whether every rank holds all elements of both sums (all_reduce), rather than a part of them.
            transport: a transport between all ranks of the group.

        Returns None if the uncompressed sum is not finite in the dtype of `result`, which is not the fault of
        compression; also if magnitudes above 1e150 make its squares overflow float64.

        Raises PeerError.
        """
        self._prints = transport.rank == 0
        if whole:  # each element must count once: take this rank's share
            rank, world_size, numel = transport.rank, transport.world_size, result.numel()
            share = slice(numel * rank // world_size, numel * (rank + 1) // world_size)
            result, exact = result[share], exact[share]
        figures = _figures(*_over_ranks(_sums(result, exact), transport))
        if figures is None:
            return None
        relative_error, cosine = figures
        alarm = relative_error > self.settings.max_relative_error
        self.findings.append(Finding(name, relative_error, cosine, alarm))
        return self.findings[-1]

    def end_step(self) -> None:
        """Close the step. All calls of the step must have finished.

        After an alarm, `on_alarm: warn` prints one line on rank 0, `tighten` prints it and halves `tightening`, and
        `stop` raises AccuracyError on all ranks.
        """
        findings, self.findings = self.findings, []
        if self.sums:
            self._calls, self.sums = self.sums, 0
        alarms = [finding for finding in findings if finding.alarm]
        if alarms:
            self._act_on(f"step {self._step + 1}: " + "; ".join(finding.describe() for finding in alarms))

    def state_dict(self) -> dict[str, float | int]:
        """State that a resumed run needs to continue as if it had not stopped."""
        return {"tightening": self.tightening, "calls": self._calls}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what `state_dict` returned."""
        self.tightening, self._calls = state["tightening"], state["calls"]

    def _act_on(self, alarm: str) -> None:
        """Print the alarm, tighten the bounds or raise AccuracyError, as `settings.on_alarm` says."""
        settings = self.settings
        allowed = f"allowed: a relative error of at most {settings.max_relative_error:g}"
        if settings.on_alarm == "stop":
            raise AccuracyError(f"{alarm} to the uncompressed sum; {allowed}. {_REMEDY}; or guard.on_alarm: warn")
        if settings.on_alarm == "tighten":
            self.tightening = max(self.tightening / 2, _MIN_TIGHTENING)
            advice = f"All bounds are now {self.tightening:g} times the configured ones"
        else:
            advice = _REMEDY
        if self._prints:
            say(f"ncz_plugins: {alarm} to the uncompressed sum; {allowed}. {advice}")


def _sums(compressed: Tensor, uncompressed: Tensor) -> Tensor:
    """float64 sums of (c - u)^2, c^2, u^2 and c * u, [4], on the CPU; u^2 is inf if the dtype of c can't hold u."""
    sums = torch.zeros(4, dtype=torch.float64, device=compressed.device)
    for pieces in zip(compressed.split(_PIECE_ELEMENTS), uncompressed.split(_PIECE_ELEMENTS)):
        c, u = (piece.double() for piece in pieces)
        difference, fits = c - u, u.to(compressed.dtype).isfinite().all()
        squares = u.dot(u).where(fits, math.inf)
        sums += torch.stack([difference.dot(difference), c.dot(c), squares, c.dot(u)])
    return sums.cpu()


def _over_ranks(sums: Tensor, transport) -> list[float]:
    """`sums` added over ranks, with the same bits on each: every rank gets all of them, and adds in rank order."""
    table = torch.full((transport.world_size, sums.numel()), -math.inf, dtype=torch.float64, device="cpu")
    table[transport.rank] = sums.nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)  # MAX can't compare NaN
    transport.start_max(table.view(-1), Counters()).wait()
    return [sum(column) for column in table.t().tolist()]


def _figures(difference: float, compressed: float, uncompressed: float, product: float) -> tuple[float, float] | None:
    """Relative error and cosine, from the four sums of `_sums`; None if the uncompressed sum is not finite."""
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
