"""Patches that send the weights which ZeRO 1 and 2 gather after a step as changes, without loss.

Every rank has the weights of the step before in the memory that the gather fills. What it updated itself, it has
overwritten, so a `Baseline` keeps a copy of that part: 1 / (number of ranks) of the weights.
"""

from __future__ import annotations

from contextvars import ContextVar

from .compression import GradientCompression
from .engine import ATTRIBUTE

_updating: ContextVar[GradientCompression | None] = ContextVar("ncz_updating_weights", default=None)


def mark_update(original):
    """Wraps a method of an optimizer that gathers updated weights."""

    def update(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE, None)
        token = _updating.set(compression if compression is not None and compression.sends_weights else None)
        try:
            return original(self, *args, **kwargs)
        finally:
            _updating.reset(token)

    return update


def gather_changes(original):
    """Replaces all_gather_dp_groups: each group of weights in one call, if the optimizer's engine compresses weights.

    As in DeepSpeed, the part of a rank is a view of the group's flat tensor.
    """

    def all_gather_dp_groups(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs):
        compression = _updating.get()
        if compression is None:
            return original(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
        for whole, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group):
            compression.gather_weights(whole, parts, group)
        return None

    return all_gather_dp_groups
