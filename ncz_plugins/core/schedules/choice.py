"""Which schedule `transport.schedule: auto` means where nothing was measured."""

from __future__ import annotations

_DIRECT_RANKS = range(2, 9)  # with many, all-to-all opens too many paths


def schedule_for(ranks: int) -> str:
    """The schedule for so many ranks that exchange frames: "ring" or "direct"."""
    return "direct" if ranks in _DIRECT_RANKS else "ring"
