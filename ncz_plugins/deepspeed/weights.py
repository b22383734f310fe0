"""Replacements that compress the weights which ZeRO gathers, without loss.

ZeRO 1 and 2 gather weights after a step, and send only changes: every rank still has the last step's weights in the
memory that the gather fills. It has overwritten its own shard, so a `Baseline` keeps a copy of that: 1 / (number of
ranks) of the weights. ZeRO 3 gathers the weights of a module and frees them after use, so it sends all of them. It also
sends all small parameters, which it keeps and gathers after each step.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from .compression import GradientCompression
from .engine import ATTRIBUTE

_Gathering = ContextVar[GradientCompression | None]  # set while an engine gathers weights

in_groups: _Gathering = ContextVar("ncz_gathering_weights_in_groups", default=None)  # as ZeRO 1 and 2 do
by_parameter: _Gathering = ContextVar("ncz_gathering_weights_by_parameter", default=None)  # as ZeRO 3 does


def mark_gathers(gathering: _Gathering, original):
    """Wrapper of a method that gathers the weights of its own engine.

    Args:
        gathering: `in_groups` or `by_parameter`. Inside a method marked `by_parameter`, every gathered tensor is a
            weight.
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
    """Replacement of all_gather_dp_groups: one call for each group of weights, if the engine compresses weights.

    As in DeepSpeed, a rank's shard is a view of the group's flat tensor.
    """

    def all_gather_dp_groups(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs):
        compression = in_groups.get()
        if compression is None:
            return original(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
        for number, (whole, shards, group) in enumerate(zip(groups_flat, partitioned_param_groups, dp_process_group)):
            compression.gather_weights(number, whole, shards, group)
        return None

    return all_gather_dp_groups


def gather_parameters(original):
    """Replacement of TorchBackend.all_gather_into_tensor: compressed without loss while ZeRO 3 gathers parameters."""

    @torch.compiler.disable
    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        compression = by_parameter.get()
        if compression is None:
            return original(self, output_tensor, input_tensor, group, async_op)
        communicator = compression.communicator(group)
        return communicator.all_gather_single(output_tensor, input_tensor, async_op, role="parameter")

    return all_gather_into_tensor
