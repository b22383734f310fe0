"""Decisions from measurements: schedule, frame size, connections, and the smallest size that gains.

All ranks pass the same numbers to these functions, so all decide alike. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_high

from ..config import MIN_BYTES
from .tuning_file import SpeedComparison, Trial

WORTH = 0.97  # largest share of the plain time that counts as a gain; a smaller gain may be noise
# Connections to each other rank -> factor by which they must carry more than the next smaller number does. A smaller
# gain may be noise, and more connections make queues overflow more often.
_MIN_GAIN = {4: 1.7, 8: 1.4}
MOST_CONNECTIONS = max(_MIN_GAIN)
# Ranks count as sharing cores if coding takes this many times as long as on a free core.
MIN_SLOWDOWN_OF_SHARED_CORES = 1.5
MIN_CORES_FOR_TWO_THREADS = 1.5  # a rank that gets this many of two cores counts as having two
_LARGE_BYTES = 16 << 20  # from here on, the constant part of a call's time is negligible
_GROWTH = 4  # factor from a size that was measured to the next one


def best(trials: Sequence[Trial]) -> Trial:
    """The first trial that is about as fast as the fastest one. `trials` begins with the usual choice."""
    fastest = min(trial.seconds for trial in trials)
    return next(trial for trial in trials if trial.seconds * WORTH <= fastest)


def crossover(comparisons: Sequence[SpeedComparison]) -> int | str:
    """The smallest size in bytes from which compression gains at all measured sizes.

    Returns "never" if compression does not gain at the largest measured size, and that is at least 16 MiB. If there was
    no time to measure 16 MiB, returns the next larger size or the default `min_bytes`, whichever is larger.

    Args:
        comparisons: in ascending order of size.
    """
    largest = comparisons[-1].nbytes
    least: int | str = "never" if largest >= _LARGE_BYTES else max(_GROWTH * largest, MIN_BYTES)
    for comparison in reversed(comparisons):
        if comparison.compressed_seconds > WORTH * comparison.plain_seconds:
            break
        least = comparison.nbytes
    return least


def connections_to_use(carried: Callable[[int], float]) -> tuple[int, float]:
    """Number of connections to use with each other rank, and the rate that they carry.

    Args:
        carried: returns the rate of a number of connections, in any unit. It is called in ascending order, until a
            number does not carry enough more than the one before it.
    """
    chosen, highest = 1, carried(1)
    for count, min_gain in _MIN_GAIN.items():
        rate = carried(count)
        if rate < min_gain * highest:
            break
        chosen, highest = count, rate
    return chosen, highest


def ranks_on_a_core(cores: Sequence[float], machines: Sequence[Sequence[int]]) -> float:
    """Number of ranks per core; 0.5 if each rank has two cores.

    Within a machine, the mean over its ranks counts, because some get more of its cores than others in a short time.
    Between machines, the median over ranks counts, because one machine may be busy with other work; of two machines,
    the slower one.

    Args:
        cores: number of cores that each rank got, [ranks].
        machines: ranks of each machine.
    """
    return median_high(len(ranks) / sum(cores[rank] for rank in ranks) for ranks in machines for _ in ranks)


def rans_costs(costs: Sequence[float], rests: Sequence[float]) -> tuple[float, float]:
    """Cost of RANS per value, and additional cost per value other than the most frequent one.

    Args:
        costs: cost per value in two arrays, in any unit, [2].
        rests: share of values other than the most frequent one in these arrays, [2].

    Returns both costs in the unit of `costs`, each 0 or more.
    """
    per_rest = max(0.0, (costs[0] - costs[1]) / (rests[0] - rests[1]))
    return max(0.0, costs[0] - per_rest * rests[0]), per_rest
