"""Replacements that compress what the ranks of one model exchange: for experts, Ulysses, and stages of a pipeline.

DeepSpeed exchanges activations and their gradients by the same all-to-all as Muon's momentum, or the states of a
checkpoint that is loaded. An engine's forward pass and the backward pass after it exchange nothing but activations and
their gradients, so the wrapped collectives compress there, and call the original everywhere else. Likewise, a
pipeline's engine has methods that send and receive nothing but activations, their gradients, and their shapes.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar

import torch

from ..core.bypass import by_dtype
from ..core.communicator import Communicator
from ..core.config import DEEPSPEED_KEY
from ..core.errors import UnsupportedError
from .compression import GradientCompression
from .engine import ATTRIBUTE

# Set while an engine whose `roles` have "activation" runs its forward pass.
_exchanging: ContextVar[GradientCompression | None] = ContextVar("ncz_exchanging_activations", default=None)
# Set while the engine of a pipeline sends to another stage, or receives from it.
_stages: ContextVar[Communicator | None] = ContextVar("ncz_stages", default=None)
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


def connect_stages(original):
    """Replacement of PipelineEngine.__init__: the stages connect, if they are to compress their messages.

    They do so here because a message has two ranks, and must not wait in its first call for all others.
    """

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        compression = getattr(self, ATTRIBUTE)
        if compression is not None and compression.sends_activations:
            _refuse_masks(self)
            compression.stages = compression.communicator(self.grid.get_pipe_parallel_group())

    return __init__


def checked_mask(original):
    """Replacement of PipelineEngine.set_has_attention_mask."""

    def set_has_attention_mask(self, value):
        original(self, value)
        if getattr(self, ATTRIBUTE).stages is not None:
            _refuse_masks(self)

    return set_has_attention_mask


def _refuse_masks(engine) -> None:
    """Raise UnsupportedError if stages send a mask as DeepSpeed does: in float16, which would be rounded."""
    if engine.has_attention_mask or engine.has_bool_tensors:
        raise UnsupportedError(
            f'{DEEPSPEED_KEY}: roles: "activation" can\'t be combined with masks that a pipeline sends as float16 '
            "(GPT2ModelPipe, set_has_attention_mask, has_bool_tensors): they would be rounded like activations. Take "
            "activation out of roles, or let each stage make its mask"
        )


def mark_messages(original):
    """Wrapper of a method of PipelineEngine that sends activations or their gradients, or receives them."""

    def exchange(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE)
        token = _stages.set(None if compression is None else compression.stages)
        try:
            return original(self, *args, **kwargs)
        finally:
            _stages.reset(token)

    return exchange


def compressed_send(original):
    """Replacement of TorchBackend.send: compressed between stages. Shapes and others in integers go plain there."""

    @torch.compiler.disable
    def send(self, tensor, dst, group=None, tag=0):
        stages = _stages.get()
        if stages is None:
            return original(self, tensor, dst, group, tag)
        return stages.send(tensor, dst, tag, role="activation")

    return send


def compressed_recv(original):
    """Replacement of TorchBackend.recv."""

    @torch.compiler.disable
    def recv(self, tensor, src=None, group=None, tag=0):
        stages = _stages.get()
        if stages is None:
            return original(self, tensor, src, group, tag)
        return stages.recv(tensor, src, tag, role="activation")

    return recv
