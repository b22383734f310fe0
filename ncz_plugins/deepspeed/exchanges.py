"""Replacements that compress what the ranks of one model exchange: tokens of experts, and sequences under Ulysses.

DeepSpeed exchanges activations and their gradients by the same all-to-all as Muon's momentum, or the states of a
checkpoint that is loaded. An engine's forward pass and the backward pass after it exchange nothing but activations and
their gradients, so the wrapped collectives compress there, and call the original everywhere else.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar

import torch

from ..core.bypass import by_dtype
from .compression import GradientCompression
from .engine import ATTRIBUTE

# Set while an engine whose `roles` have "activation" runs its forward pass.
_exchanging: ContextVar[GradientCompression | None] = ContextVar("ncz_exchanging_activations", default=None)
_latest: weakref.ref[GradientCompression] | None = None  # of the last forward pass, to which a backward pass belongs


def mark_exchanges(original):
    """Wrapper of a method of an engine that exchanges activations with other ranks, or their gradients."""

    def exchange(self, *args, **kwargs):
        global _latest
        compression = getattr(self, ATTRIBUTE, None)
        if compression is not None and not compression.sends_activations:
            compression = None
        _latest = None if compression is None else weakref.ref(compression)
        token = _exchanging.set(compression)
        try:
            return original(self, *args, **kwargs)
        finally:
            _exchanging.reset(token)

    return exchange


def _compression_of(*tensors: torch.Tensor) -> GradientCompression | None:
    """What compresses an exchange of these tensors that begins now; None: it goes plain."""
    if torch._C._current_graph_task_id() == -1:  # no backward pass runs on this thread
        compression = _exchanging.get()
    else:
        compression = None if _latest is None else _latest()
    if compression is None or by_dtype(*[tensor.dtype for tensor in tensors]):  # numbers of tokens are integers
        return None
    return compression


def compressed_all_to_all(original):
    """Replacement of TorchBackend.all_to_all_single: compressed while activations are exchanged."""

    @torch.compiler.disable
    def all_to_all_single(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        given = output, input, output_split_sizes, input_split_sizes
        compression = _compression_of(output, input)
        if compression is None:
            return original(self, *given, group, async_op)
        return compression.communicator(group).all_to_all_single(*given, async_op, role="activation")

    return all_to_all_single
