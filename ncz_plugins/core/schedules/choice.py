"""Choice of the schedule for `transport.schedule: auto`, if nothing was measured.

The limits follow from measurements of 4 to 16 ranks and, for more, from what `ncz plan` simulates: see
docs/results/planning.md. Among few ranks, messages to all take less time than coding anew in each round of halving.
Among many they take nearly all the time, the more so the smaller the tensor. On a slow link they overflow the queues of
switches, and TCP slows down: there a ring, in which each rank hears from one other, is faster.
"""

from __future__ import annotations

_ALWAYS_DIRECT = range(2, 5)  # numbers of ranks
_MOSTLY_DIRECT_RANKS, _MOST_DIRECT_RANKS = 8, 16
_LARGE_SEGMENT_BYTES = 256 << 10  # of each rank, from which bytes take longer than messages
_SLOW_GBPS = 0.5


def schedule_for(ranks: int, nbytes: int, link_gbps: float | None = None, on_gpu: bool = False) -> str:
    """The schedule, "direct", "halving" or "ring", for an exchange of frames. All ranks choose alike.

    Args:
        ranks: number of ranks that exchange frames.
        nbytes: bytes of the whole tensor before compression.
        link_gbps: speed of their link in Gbit/s, as all ranks know it; None: unknown.
        on_gpu: whether the tensor is on a GPU, where halving does not run.
    """
    if on_gpu:
        return "direct" if 2 <= ranks <= _MOSTLY_DIRECT_RANKS else "ring"
    if ranks in _ALWAYS_DIRECT:
        return "direct"
    if not 2 <= ranks <= _MOST_DIRECT_RANKS:
        return "halving"
    is_large = nbytes >= ranks * _LARGE_SEGMENT_BYTES
    if is_large and link_gbps is not None and link_gbps < _SLOW_GBPS:
        return "ring"
    return "direct" if is_large or ranks <= _MOSTLY_DIRECT_RANKS else "halving"
