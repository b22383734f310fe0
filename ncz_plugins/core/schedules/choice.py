"""Choice of the schedule for `transport.schedule: auto`, if nothing was measured."""

from __future__ import annotations

_DIRECT_RANKS = range(2, 9)  # with more ranks, all-to-all uses too many network paths at once


def schedule_for(ranks: int) -> str:
    """The schedule, "ring" or "direct", for this number of ranks that exchange frames."""
    return "direct" if ranks in _DIRECT_RANKS else "ring"
