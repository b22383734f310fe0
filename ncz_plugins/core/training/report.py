"""Line that rank 0 prints after the first steps: the share of bytes that goes compressed, and why the rest does not."""

from __future__ import annotations

from ..config import Config
from ..reasons import REMEDIES, Bypass
from ..runtime.statistics import Counters

FIRST_STEPS = 3  # steps after warm-up that the first line is about
LATER_STEPS = 100  # steps over which the share is looked at again
_MIN_CHANGE_OF_SHARE = 0.25  # a second line is printed only for a change as large as this


class CompressionReport:
    """Author of up to two lines about one training.

    The first line comes after FIRST_STEPS steps, the second one when the share of compressed bytes has changed by
    _MIN_CHANGE_OF_SHARE.
    """

    def __init__(self, config: Config):
        self._config = config
        self._seen = Counters()
        self._steps = 0
        self._reported: list[float] = []  # shares that lines were about

    def end_step(self, step: int, done: Counters) -> str | None:
        """The line to print after a step; None if there is nothing to report.

        Args:
            step: number of the step, from 1.
            done: counters of this step.
        """
        if step <= self._config.steps.warmup or len(self._reported) == 2:
            return None
        self._seen.add(done)
        self._steps += 1
        if self._steps < (LATER_STEPS if self._reported else FIRST_STEPS):
            return None
        seen, steps = self._seen, self._steps
        self._seen, self._steps = Counters(), 0
        # Compressed bytes as a share of all, counted as a plain collective would send them.
        share = 1 - sum(seen.bypassed_bytes.values()) / seen.plain_bytes if seen.plain_bytes else 0.0
        if self._reported and abs(share - self._reported[0]) < _MIN_CHANGE_OF_SHARE:
            return None
        self._reported.append(share)
        return f"ncz_plugins: steps {step - steps + 1} to {step}: {self._words(seen, share)}"

    def _words(self, seen: Counters, share: float) -> str:
        if not seen.calls:
            return (
                "nothing was reduced by this package, so nothing is compressed. One rank has nothing to send; the "
                "guide of your framework says what else stays uncompressed"
            )
        words = f"{share:.0%} of the bytes went compressed, ratio {seen.ratio:.1f}"
        if not seen.bypasses:
            return words
        plain = sum(seen.bypasses.values())
        reason = max(seen.bypassed_bytes or seen.bypasses, key=(seen.bypassed_bytes or seen.bypasses).get)
        remedy = REMEDIES[Bypass(reason)]
        return f"{words}; {plain} of {seen.calls} calls went plain, most of their bytes as {reason}: {remedy}"
