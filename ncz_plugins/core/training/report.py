"""What rank 0 says unasked: which share of the bytes goes compressed, and why the rest does not."""

from __future__ import annotations

from ..config import Config
from ..reasons import REMEDIES, Bypass
from ..runtime.statistics import Counters

FIRST_STEPS = 3  # after warm-up; then it is said for the first time
LATER_STEPS = 100  # over which it is looked at later
_MUCH = 0.25  # by so much the share must have changed to be worth another line


class CompressionReport:
    """Finds words for the steps of one training.

    Once after the first steps, and once more if the share of compressed bytes changes much.
    """

    def __init__(self, config: Config):
        self._config = config
        self._seen = Counters()
        self._steps = 0
        self._told: list[float] = []  # the shares that were told

    def end_step(self, step: int, done: Counters) -> str | None:
        """The line to print after a step; None if there is nothing to say.

        Args:
            step: counted from 1.
            done: what was counted in it.
        """
        if step <= self._config.steps.warmup or len(self._told) == 2:
            return None
        self._seen.add(done)
        self._steps += 1
        if self._steps < (LATER_STEPS if self._told else FIRST_STEPS):
            return None
        seen, steps = self._seen, self._steps
        self._seen, self._steps = Counters(), 0
        share = _share(seen)
        if self._told and abs(share - self._told[0]) < _MUCH:
            return None
        self._told.append(share)
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


def _share(seen: Counters) -> float:
    """Compressed bytes as a share of all, both counted as what plain collectives would send."""
    if not seen.plain_bytes:
        return 0.0
    return 1 - sum(seen.bypassed_bytes.values()) / seen.plain_bytes
