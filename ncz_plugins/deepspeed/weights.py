"""Patches that compress the weights which ZeRO gathers, without loss.

ZeRO 1 and 2 gather them after a step, as changes: every rank has the weights of the step before in the memory that the
gather fills. What it updated itself, it has overwritten, so a `Baseline` keeps a copy of that part: 1 / (number of
ranks) of the weights. ZeRO 3 gathers what a module needs, and frees it after use, so it is sent as it is; and so are
the small parameters that it keeps, and gathers after each step.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from .compression import GradientCompression
from .engine import ATTRIBUTE

_Gathering = ContextVar[GradientCompression | None]

in_groups: _Gathering = ContextVar("ncz_gathering_weights_in_groups", default=None)  # as ZeRO 1 and 2 do
by_parameter: _Gathering = ContextVar("ncz_gathering_weights_by_parameter", default=None)  # as ZeRO 3 does


def mark_gathers(gathering: _Gathering, original):
    """Wraps a method that gathers weights of its own engine.

    Args:
        gathering: says how. Inside a method that does it `by_parameter`, whatever is gathered is weights.
    """

    def gather(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE, None)
        token = gathering.set(compression if compression is not None and compression.sends_weights else None)
        try:
            return original(self, *args, **kwargs)
        finally:
            gathering.reset(token)

    return gather


def gather_changes(original):
    """Replaces all_gather_dp_groups: each group of weights in one call, if the optimizer's engine compresses weights.

    As in DeepSpeed, the part of a rank is a view of the group's flat tensor.
    """

    def all_gather_dp_groups(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs):
        compression = in_groups.get()
        if compression is None:
            return original(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
        for number, (whole, parts, group) in enumerate(zip(groups_flat, partitioned_param_groups, dp_process_group)):
            compression.gather_weights(number, whole, parts, group)
        return None

    return all_gather_dp_groups


def gather_parameters(original):
    """Replaces TorchBackend.all_gather_into_tensor: without loss while ZeRO 3 gathers parameters, else as it was."""

    @torch.compiler.disable
    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        compression = by_parameter.get()
        if compression is None:
            return original(self, output_tensor, input_tensor, group, async_op)
        communicator = compression.communicator(group)
        return communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op, role="parameter")

    return all_gather_into_tensor
