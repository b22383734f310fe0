"""Where this plugin meets DeepSpeed: everything that it replaces there, in one place.

The same collectives on the same groups carry gradients, weights, norms and flags. Only gradients
may be compressed, so the methods that reduce gradients are wrapped to say so while they run, and
the collectives look at that. Everything else passes through untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module

import torch
import torch.nn.functional as F

from ..core.errors import UnsupportedError
from .compression import GradientCompression, configured, describe

# Methods inside which every collective carries gradients, and nothing but gradients.
_GRADIENT_METHODS = {
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): ("allreduce_bucket",),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): (
        "allreduce_bucket",
        "gradient_reduction_w_predivide",
    ),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): (
        "allreduce_bucket",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ),
}
_ATTRIBUTE = "communication_compression"  # on engines, and on the optimizers that reduce for them
_reducing: ContextVar[GradientCompression | None] = ContextVar("ncz_reducing_gradients", default=None)


def install() -> None:
    """Put the plugin in place, once. Raises UnsupportedError if this DeepSpeed is laid out differently."""
    engine = _lookup("deepspeed.runtime.engine", "DeepSpeedEngine")
    if hasattr(engine, _ATTRIBUTE):
        return
    for (module, name), methods in _GRADIENT_METHODS.items():
        for method in methods:
            _wrap(_lookup(module, name), method, _says_gradients)
    backend = _lookup("deepspeed.comm.torch", "TorchBackend")
    _wrap(backend, "all_reduce", _compressed_all_reduce)
    _wrap(backend, "reduce_scatter_tensor", _compressed_reduce_scatter)
    # The optimizer imported the function by name, so that is where it must be replaced.
    _wrap(import_module("deepspeed.runtime.zero.stage3"), "reduce_scatter_coalesced", _zero_padded)
    _wrap(engine, "__init__", _configures)
    _wrap(engine, "_take_model_step", _ends_step)
    _wrap(engine, "destroy", _closes)
    setattr(engine, _ATTRIBUTE, None)


def _lookup(module: str, name: str):
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unknown_deepspeed(f"{module}.{name}") from error


def _wrap(owner, name: str, wrapper: Callable) -> None:
    try:
        original = getattr(owner, name)
    except AttributeError as error:
        raise _unknown_deepspeed(f"{owner.__name__}.{name}") from error
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _unknown_deepspeed(what: str) -> UnsupportedError:
    import deepspeed

    return UnsupportedError(
        f"DeepSpeed {deepspeed.__version__} has no {what}, which ncz_plugins hooks into; "
        "use a DeepSpeed version that the README lists as tested"
    )


# ------------------------------------------------------------------ wrappers


def _configures(original):
    def __init__(self, *args, **kwargs):
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        compression = configured(arguments["config_class"])  # before the engine starts what takes long
        original(self, *args, **kwargs)
        setattr(self, _ATTRIBUTE, compression)
        if compression is not None:
            if self.optimizer is not None:
                setattr(self.optimizer, _ATTRIBUTE, compression)
            if self.global_rank == 0:
                print(describe(compression, self.zero_optimization_stage()), flush=True)

    return __init__


def _ends_step(original):
    def _take_model_step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        compression = getattr(self, _ATTRIBUTE)
        if compression is not None:
            compression.end_step(self.global_steps)
        return result

    return _take_model_step


def _closes(original):
    def destroy(self, *args, **kwargs):
        compression = getattr(self, _ATTRIBUTE)
        if compression is not None:
            compression.close()
        return original(self, *args, **kwargs)

    return destroy


def _says_gradients(original):
    def reduce_gradients(self, *args, **kwargs):
        compression = getattr(self, _ATTRIBUTE, None)
        if compression is None:
            return original(self, *args, **kwargs)
        token = _reducing.set(compression)
        try:
            return original(self, *args, **kwargs)
        finally:
            _reducing.reset(token)

    return reduce_gradients


def _compressed_all_reduce(original):
    @torch.compiler.disable
    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        compression = _reducing.get()
        if compression is None:
            return original(self, tensor, op, group, async_op)
        return compression.communicator(group).all_reduce(tensor, self._reduce_op(op), async_op, role="gradient")

    return all_reduce


def _compressed_reduce_scatter(original):
    @torch.compiler.disable
    def reduce_scatter_tensor(
        self, output_tensor, input_tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False
    ):
        compression = _reducing.get()
        if compression is None:
            return original(self, output_tensor, input_tensor, op, group, async_op)
        return compression.communicator(group).reduce_scatter_tensor(
            output_tensor, input_tensor, self._reduce_op(op), async_op, role="gradient"
        )

    return reduce_scatter_tensor


def _zero_padded(original):
    """DeepSpeed pads partitions with uninitialised memory; what lies there would set a block's scale."""

    def reduce_scatter_coalesced(tensors, group=None):
        if _reducing.get() is None:
            return original(tensors, group)
        n, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        padded = [t if t.numel() % n == 0 else F.pad(t.reshape(-1), (0, -t.numel() % n)) for t in tensors]
        partitions = original(padded, group)
        # Without the padding, the parts of the last ranks are shorter.
        lengths = [max(0, min(p.numel(), t.numel() - rank * p.numel())) for t, p in zip(tensors, partitions)]
        return [p[:length] for p, length in zip(partitions, lengths)]

    return reduce_scatter_coalesced
