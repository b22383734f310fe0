"""Choice of the schedule for `transport.schedule: auto`, if nothing was measured.

It follows from what a message costs, how long a trip takes, and how long the bytes are on the link. Direct sends a
message to each other rank, twice, with two trips; meanwhile its bytes travel. Halving sends and receives a message in
each of 2 log2(ranks) rounds, each with a trip, and bytes of a round travel before the next one. In the simulation of
`ncz plan`, which has the same costs, 2 to 16 ranks take at most a tenth longer than by the fastest schedule. Every
command of `ncz` reads those costs from here, so nothing here imports torch.

What is not simulated: on a slow link messages to all overflow the queues of switches, and TCP slows down. There a ring
is faster, in which each rank hears from one other. docs/results/planning.md has what was measured.
"""

from __future__ import annotations

from ..config.fields import FAR_TRIP_SECONDS, MOST_SMALL_RANKS

MESSAGE_US = 242  # a core's time to send a message and to receive one, fitted by benchmarks/plan.py
_RATIO = 7.5  # of float32 to codes at the default bound, those of a rank and those of the sums of 8 to 16
_GBPS = 1.0  # of an unknown link, as coders assume
_MOST_DIRECT_ON_GPUS = 8  # ranks
# From 5 ranks on, TCP slows down below this speed if each rank sends each so many bytes, before compression.
_LEAST_CROWD, _SLOW_GBPS, _CROWDING_BYTES = 5, 0.5, 256 << 10


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
        return "direct" if 2 <= ranks <= _MOST_DIRECT_ON_GPUS else "ring"
    if not 2 <= ranks <= MOST_SMALL_RANKS:  # direct would connect all of them
        return "halving"
    gbps = _GBPS if link_gbps is None else link_gbps
    is_slow = gbps < _SLOW_GBPS and trip_seconds <= FAR_TRIP_SECONDS  # a far link is measured as slower than it is
    if is_slow and ranks >= _LEAST_CROWD and nbytes >= ranks * _CROWDING_BYTES:
        return "ring"
    # Seconds, but for what both schedules take alike.
    rounds, message = (ranks - 1).bit_length(), 1e-6 * MESSAGE_US
    trip = message / 2 + trip_seconds  # its receiver is busy for half of a message's time, after it has arrived
    direct = 2 * ((ranks - 1) * message + trip)
    halving = 2 * (rounds * (message + trip) + 8e-9 * nbytes / _RATIO / gbps)
    return "halving" if halving < direct else "direct"
