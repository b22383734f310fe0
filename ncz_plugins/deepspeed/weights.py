"""Patches that compress the weights which ZeRO gathers, without loss.

ZeRO 1 and 2 gather them after a step, as changes: every rank has the weights of the step before in the memory that the
gather fills. What it updated itself, it has overwritten, so a `Baseline` keeps a copy of that part: 1 / (number of
ranks) of the weights. ZeRO 3 gathers what a module needs, and frees it after use, so it is sent as it is.
"""

from __future__ import annotations

from contextvars import ContextVar

from .compression import GradientCompression
from .engine import ATTRIBUTE

_gathering: ContextVar[GradientCompression | None] = ContextVar("ncz_gathering_weights", default=None)


def mark_gathers(original):
    """Wraps a method that gathers weights of its own engine."""

    def gather(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE, None)
        token = _gathering.set(compression if compression is not None and compression.sends_weights else None)
        try:
            return original(self, *args, **kwargs)
        finally:
            _gathering.reset(token)

    return gather


def gather_changes(original):
    """Replaces all_gather_dp_groups: each group of weights in one call, if the optimizer's engine compresses weights.

    As in DeepSpeed, the part of a rank is a view of the group's flat tensor.
    """

    def all_gather_dp_groups(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs):
        compression = _gathering.get()
        if compression is None:
            return original(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
        for whole, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group):
            compression.gather_weights(whole, parts, group)
        return None

    return all_gather_dp_groups


def gather_parameters(original):
    """Replaces _dist_allgather_fn, which begins to gather parameters of ZeRO 3."""

    def _dist_allgather_fn(input_tensor, output_tensor, group=None):
        compression = _gathering.get()
        if compression is None:
            return original(input_tensor, output_tensor, group)
        communicator = compression.communicator(group)
        return communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op=True, role="parameter")

    return _dist_allgather_fn
