"""The list of everything that this plugin replaces in DeepSpeed. engine.py and gradients.py hold the replacements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

from ..core.errors import UnsupportedError
from . import engine, gradients
from .parameter_slices import of_engine, of_stage_3, of_stages_1_and_2

# By class: a function that lists the gradients that may be reduced now, with their parameters' names, and the methods
# that reduce gradients. Inside these methods every collective carries the gradients that the first argument names, and
# nothing else.
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


def install() -> None:
    """Replace what the plugin replaces; a second call does nothing.

    Raises UnsupportedError if this DeepSpeed lacks a class or a method that is to be replaced.
    """
    engine_class = _lookup("deepspeed.runtime.engine", "DeepSpeedEngine")
    if hasattr(engine_class, engine.ATTRIBUTE):
        return
    for (module, name), (list_gradients, methods) in _GRADIENT_METHODS.items():
        for method in methods:
            _wrap(_lookup(module, name), method, functools.partial(gradients.mark_gradients, list_gradients))
    backend = _lookup("deepspeed.comm.torch", "TorchBackend")
    _wrap(backend, "all_reduce", gradients.compressed_all_reduce)
    _wrap(backend, "reduce_scatter_tensor", gradients.compressed_reduce_scatter)
    # The optimizer imported the function by name, so its module is where it must be replaced.
    _wrap(import_module("deepspeed.runtime.zero.stage3"), "reduce_scatter_coalesced", gradients.group_by_settings)
    _wrap(engine_class, "__init__", engine.configure_engine)
    _wrap(engine_class, "_take_model_step", engine.end_step)
    _wrap(engine_class, "save_checkpoint", engine.save_compression)
    _wrap(engine_class, "_load_checkpoint", engine.load_compression)
    _wrap(engine_class, "destroy", engine.close_compression)
    setattr(engine_class, engine.ATTRIBUTE, None)


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
