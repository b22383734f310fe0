"""Where this plugin meets DeepSpeed: everything that it replaces there, in one place.

The same collectives on the same groups carry gradients, weights, norms and flags. Only gradients
may be compressed, so the methods that reduce gradients are wrapped to say so while they run, and
the collectives look at that. Everything else passes through untouched.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.training.policy import ParameterSlice
from . import checkpoint
from .compression import GradientCompression, configured, describe
from .parameter_slices import of_engine, of_stage_3, of_stages_1_and_2, rank_major

# Methods inside which every collective carries gradients, and nothing but gradients: those that the method is given
# first. With what finds the gradients, and whose they are, that may be among them.
_GRADIENT_METHODS = {
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): (of_engine, ("allreduce_bucket",)),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): (
        of_stages_1_and_2,
        ("allreduce_bucket", "gradient_reduction_w_predivide"),
    ),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): (
        of_stage_3,
        (
            "allreduce_bucket",
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        ),
    ),
}
_ATTRIBUTE = "communication_compression"  # on engines, and on the optimizers that reduce for them


class _Reduction(NamedTuple):
    """The reduction of gradients that is under way, and what they consist of, one after another."""

    compression: GradientCompression
    parts: list[ParameterSlice]


_reducing: ContextVar[_Reduction | None] = ContextVar("ncz_reducing_gradients", default=None)


def install() -> None:
    """Put the plugin in place, once. Raises UnsupportedError if this DeepSpeed is laid out differently."""
    engine = _lookup("deepspeed.runtime.engine", "DeepSpeedEngine")
    if hasattr(engine, _ATTRIBUTE):
        return
    for (module, name), (gradients_of, methods) in _GRADIENT_METHODS.items():
        for method in methods:
            _wrap(_lookup(module, name), method, functools.partial(_says_gradients, gradients_of))
    backend = _lookup("deepspeed.comm.torch", "TorchBackend")
    _wrap(backend, "all_reduce", _compressed_all_reduce)
    _wrap(backend, "reduce_scatter_tensor", _compressed_reduce_scatter)
    # The optimizer imported the function by name, so that is where it must be replaced.
    _wrap(import_module("deepspeed.runtime.zero.stage3"), "reduce_scatter_coalesced", _by_treatment)
    _wrap(engine, "__init__", _configures)
    _wrap(engine, "_take_model_step", _ends_step)
    _wrap(engine, "save_checkpoint", _saves)
    _wrap(engine, "_load_checkpoint", _loads)
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
            if self.monitor.enabled:
                compression.feed(self.monitor)
            if self.global_rank == 0:
                print(describe(compression, self.zero_optimization_stage()), flush=True)

    return __init__


def _ends_step(original):
    def _take_model_step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        compression = getattr(self, _ATTRIBUTE)
        if compression is not None:
            compression.training.end_step()
        return result

    return _take_model_step


def _saves(original):
    signature = inspect.signature(original)

    def save_checkpoint(self, *args, **kwargs):
        compression = getattr(self, _ATTRIBUTE)
        given = signature.bind(self, *args, **kwargs).arguments
        if compression is not None and given["save_dir"]:  # which DeepSpeed refuses if it is empty
            tag = given.get("tag")
            tag = f"global_step{self.global_steps}" if tag is None else str(tag)  # as DeepSpeed names it
            # First, as a barrier follows: "latest" never names a checkpoint that lacks our part.
            checkpoint.save(compression.training, os.path.join(given["save_dir"], tag))
        return original(self, *args, **kwargs)

    return save_checkpoint


def _loads(original):
    signature = inspect.signature(original)

    def _load_checkpoint(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        compression = getattr(self, _ATTRIBUTE)
        if compression is not None and result[0] is not None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            options = given.arguments
            if options["load_optimizer_states"] and not options["load_module_only"]:
                checkpoint.load(compression.training, os.path.join(options["load_dir"], options["tag"]), self.device)
        return result

    return _load_checkpoint


def _closes(original):
    def destroy(self, *args, **kwargs):
        compression = getattr(self, _ATTRIBUTE)
        if compression is not None:
            compression.close()
        return original(self, *args, **kwargs)

    return destroy


def _says_gradients(gradients_of, original):
    def reduce_gradients(self, given, *args, **kwargs):
        compression = getattr(self, _ATTRIBUTE, None)
        if compression is None:
            return original(self, given, *args, **kwargs)
        # ZeRO 3 also hands in the parameters whose gradients are meant.
        tensors = [each.grad if isinstance(each, torch.nn.Parameter) else each for each in _listed(given)]
        with _under_way(_Reduction(compression, compression.parts(tensors, gradients_of(self)))):
            return original(self, given, *args, **kwargs)

    return reduce_gradients


@contextmanager
def _under_way(reduction: _Reduction) -> Iterator[None]:
    token = _reducing.set(reduction)
    try:
        yield
    finally:
        _reducing.reset(token)


def _listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _compressed_all_reduce(original):
    @torch.compiler.disable
    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        reduction = _reducing.get()
        if reduction is None:
            return original(self, tensor, op, group, async_op)
        communicator = reduction.compression.communicator(group)
        return communicator.all_reduce(tensor, self._reduce_op(op), async_op, role="gradient", parts=reduction.parts)

    return all_reduce


def _compressed_reduce_scatter(original):
    @torch.compiler.disable
    def reduce_scatter_tensor(
        self, output_tensor, input_tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False
    ):
        reduction = _reducing.get()
        if reduction is None:
            return original(self, output_tensor, input_tensor, op, group, async_op)
        return reduction.compression.communicator(group).reduce_scatter_tensor(
            output_tensor, input_tensor, self._reduce_op(op), async_op, role="gradient", parts=reduction.parts
        )

    return reduce_scatter_tensor


def _by_treatment(original):
    """One call for all gradients that are treated alike, each padded with zeros.

    DeepSpeed pads partitions with uninitialised memory; what lies there would set a block's scale.
    """

    def reduce_scatter_coalesced(tensors, group=None):
        reduction = _reducing.get()
        if reduction is None:
            return original(tensors, group)
        compression, parts = reduction
        ranks, dtype = compression.communicator(group).ranks, tensors[0].dtype
        n, rank = len(ranks), torch.distributed.get_rank(group)
        partitions = [None] * len(tensors)
        for _, members in compression.training.grouped(parts, dtype, "gradient", ranks):
            padded = [_padded(tensors[i], n) for i in members]
            with _under_way(_Reduction(compression, rank_major([parts[i] for i in members], n))):
                reduced = original(padded, group)
            for i, partition in zip(members, reduced):
                # Without the padding, the parts of the last ranks are shorter.
                left = max(0, tensors[i].numel() - rank * partition.numel())
                partitions[i] = partition[:left]
        return partitions

    return reduce_scatter_coalesced


def _padded(tensor: Tensor, ranks: int) -> Tensor:
    """`tensor`, with zeros up to a multiple of the number of ranks."""
    missing = -tensor.numel() % ranks
    return F.pad(tensor.reshape(-1), (0, missing)) if missing else tensor
