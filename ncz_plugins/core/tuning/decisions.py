"""What follows from measurements: the schedule, the frame size, and from which size on compression gains.

All ranks pass the same numbers to these functions, so that all decide alike. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_high

from ..config import MIN_BYTES
from .tuning_file import SpeedComparison, Trial

WORTH = 0.97  # of the plain time: a smaller gain can't be distinguished from noise
# Connections with each other rank -> how many times as much as fewer of them they must carry to be used. A smaller gain
# may be noise, and several make queues overflow more often.
_LEAST_GAIN = {4: 1.7, 8: 1.4}
MOST_CONNECTIONS = max(_LEAST_GAIN)
SHARED = 1.5  # times as long as by itself that coding takes, from which on cores are taken to be shared
SPARE = 1.5  # cores of a rank, of two that it could use, from which on it is taken to have a second one
_LARGE_BYTES = 16 << 20  # where the time that does not depend on the size no longer counts
_NEXT = 4  # times a size


def best(trials: Sequence[Trial]) -> Trial:
    """The first trial that is about as fast as the fastest one. The usual choice comes first in `trials`."""
    fastest = min(trial.seconds for trial in trials)
    return next(trial for trial in trials if trial.seconds * WORTH <= fastest)


def crossover(comparisons: Sequence[SpeedComparison]) -> int | str:
    """The smallest size in bytes from which compression gains at every size that was measured.

    Returns "never" if compression does not gain at the largest size measured, and that size is large. If there was no
    time to measure a large one, returns the next size, but at least the default: an unknown size is tried.

    Args:
        comparisons: in order of size, the smallest first.
    """
    largest = comparisons[-1].nbytes
    least: int | str = "never" if largest >= _LARGE_BYTES else max(_NEXT * largest, MIN_BYTES)
    for comparison in reversed(comparisons):
        if comparison.compressed_seconds > WORTH * comparison.plain_seconds:
            break
        least = comparison.nbytes
    return least


def connections_to_use(carried: Callable[[int], float]) -> tuple[int, float]:
    """How many connections with each other rank to use, and what these carry.

    Args:
        carried: gives what so many carry, in any unit. It is asked about more of them only if fewer were worth it.
    """
    chosen, most = 1, carried(1)
    for count, least_gain in _LEAST_GAIN.items():
        found = carried(count)
        if found < least_gain * most:
            break
        chosen, most = count, found
    return chosen, most


def ranks_on_a_core(cores: Sequence[float], machines: Sequence[Sequence[int]]) -> float:
    """How many ranks share a core; 1/2 where each rank has two cores.

    Of a machine it is the mean, as its ranks share all of its cores, and in a short while some have more of them than
    others. Of machines it is the median over ranks, as one may be busy with other work; of two, that of the slower one.

    Args:
        cores: that each rank has had.
        machines: the ranks of each.
    """
    return median_high(len(ranks) / sum(cores[rank] for rank in ranks) for ranks in machines for _ in ranks)


def rans_costs(costs: Sequence[float], rests: Sequence[float]) -> tuple[float, float]:
    """What RANS costs per value and, in addition, per value other than the most frequent one.

    Args:
        costs: cost per value in two arrays, in any unit.
        rests: share of values other than the most frequent one in each of these arrays.

    Returns both costs in the unit of `costs`, 0 or more.
    """
    per_rest = max(0.0, (costs[0] - costs[1]) / (rests[0] - rests[1]))
    return max(0.0, costs[0] - per_rest * rests[0]), per_rest
