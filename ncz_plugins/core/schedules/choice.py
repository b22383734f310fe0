"""Choice of the schedule for `transport.schedule: auto`, if nothing was measured.

The limits follow from measurements of 4 to 16 ranks and, for more, from what `ncz plan` simulates: see
docs/results/planning.md. Among few ranks, messages to all take less time than coding anew in each round of halving.
Among many they take nearly all the time, the more so the smaller the tensor. On a slow link they overflow the queues of
switches, and TCP slows down: there a ring, in which each rank hears from one other, is faster. On a far link a trip
takes longer than messages to 15 others. Direct has 2 trips one after another, halving 2 log2(ranks), a ring
2 (ranks - 1).
"""

from __future__ import annotations

from ..transport.base import FAR_TRIP_SECONDS

_ALWAYS_DIRECT = range(2, 5)  # numbers of ranks
_MOSTLY_DIRECT_RANKS, _MOST_DIRECT_RANKS = 8, 16
_LARGE_SEGMENT_BYTES = 256 << 10  # of each rank, from which bytes take longer than messages
_SLOW_GBPS = 0.5


def schedule_for(
    ranks: int, nbytes: int, link_gbps: float | None = None, on_gpu: bool = False, trip_seconds: float = 0.0
) -> str:
    """The schedule, "direct", "halving" or "ring", for an exchange of frames. All ranks choose alike.

    Args:
        ranks: number of ranks that exchange frames.
        nbytes: bytes of the whole tensor before compression.
        link_gbps: speed of their link in Gbit/s, as all ranks know it; None: unknown.
        on_gpu: whether the tensor is on a GPU, where halving does not run.
        trip_seconds: time of a short message from one rank to another, as all ranks know it; 0: unknown.
    """
    if on_gpu:
        return "direct" if 2 <= ranks <= _MOSTLY_DIRECT_RANKS else "ring"
    if ranks in _ALWAYS_DIRECT:
        return "direct"
    if not 2 <= ranks <= _MOST_DIRECT_RANKS:  # direct would connect all of them
        return "halving"
    if trip_seconds > FAR_TRIP_SECONDS:  # then nothing measured says that a link is slow
        return "direct"
    is_large = nbytes >= ranks * _LARGE_SEGMENT_BYTES
    if is_large and link_gbps is not None and link_gbps < _SLOW_GBPS:
        return "ring"
    return "direct" if is_large or ranks <= _MOSTLY_DIRECT_RANKS else "halving"
