"""Replacements for the life of a DeepSpeed engine: start, step, save, load, destroy.

Each function takes a method of DeepSpeedEngine and returns its replacement.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys

from deepspeed.comm import comm
from deepspeed.comm.torch import TorchBackend

from ..core.config import DEEPSPEED_KEY, find_in_deepspeed
from ..core.errors import UnsupportedError
from ..core.messages import say
from ..core.training.muon import warn
from . import checkpoint
from .compression import configured, describe
from .parameter_slices import held_by_parts, trained_by_muon

ATTRIBUTE = "communication_compression"  # of engines, and of the optimizers that reduce for them

warns_if_none_compresses = True  # at the end of the process; `ncz enable` sets it to False

_compressed: list[bool] = []  # on rank 0: whether each engine of this process has our key


@atexit.register
def _warn_if_none_compresses() -> None:
    if warns_if_none_compresses and _compressed and not any(_compressed):
        say(
            "ncz_plugins.deepspeed was imported, and nothing was compressed on rank 0: no DeepSpeed configuration "
            f'there has the key "{DEEPSPEED_KEY}" at its top level. Add it, as "{DEEPSPEED_KEY}": "ncclz", or drop the '
            "import",
            sys.stderr,
        )


def configure_engine(original):
    """Replacement of __init__: reads our key of the configuration, and gives the engine its GradientCompression."""

    def __init__(self, *args, **kwargs):
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        given = (arguments.get(name) for name in ("config_class", "mpu", "mesh_device"))
        compression = configured(*given)  # first, because the original takes long
        original(self, *args, **kwargs)
        if compression is not None:
            require_replaced(comm.cdb)
            compression.keep_exact(held_by_parts(self))
        setattr(self, ATTRIBUTE, compression)
        if self.global_rank == 0:
            _compressed.append(compression is not None)
        if compression is not None:
            if self.optimizer is not None:
                setattr(self.optimizer, ATTRIBUTE, compression)
                # ZeRO 3: the coordinator that gathers weights belongs to an attribute of the optimizer, or to the
                # object that stands in for the optimizer where there is none.
                gathers = getattr(self.optimizer, "parameter_offload", self.optimizer)
                if hasattr(gathers, "get_param_coordinator"):
                    setattr(gathers.get_param_coordinator(), ATTRIBUTE, compression)
            if self.monitor.enabled:
                compression.feed(self.monitor)
            if _is_first(self):
                compression.training.rank = 0  # rank 0 writes and prints statistics
                say(describe(compression, self.zero_optimization_stage(), self.seq_dp_world_size))
                if self.seq_dp_world_size > 1:
                    warn(self.basic_optimizer, compression.config, trained_by_muon(self))

    return __init__


def _is_first(engine) -> bool:
    """Whether this is the engine's first rank, over data, model and pipeline parallelism."""
    if engine.checkpoint_mp_rank or getattr(engine.mpu, "get_pipeline_model_parallel_rank", lambda: 0)():
        return False
    return comm.get_rank(engine.seq_data_parallel_group) == 0


def require_replaced(backend) -> None:
    """Raise UnsupportedError if DeepSpeed's backend has an all_reduce that the plugin has not replaced."""
    if type(backend).all_reduce is not TorchBackend.all_reduce:
        raise UnsupportedError(
            f"DeepSpeed communicates by {type(backend).__name__}, which reduces gradients itself: they can't be "
            "compressed there. Uninstall oneccl_bindings_for_pytorch, or take communication_compression out of the "
            "configuration"
        )


def end_step(original):
    """Replacement of _take_model_step: an optimizer step ends a step of compression."""

    def _take_model_step(self, *args, **kwargs):
        _require_configured(self)
        compression = getattr(self, ATTRIBUTE)
        if compression is None:
            return original(self, *args, **kwargs)
        before = _loss_scale(self)
        result = original(self, *args, **kwargs)
        after = _loss_scale(self)
        # PyTorch's scaler does not tell DeepSpeed that it skips a step, but it lowers its scale then.
        compression.end_step(was_skipped=not self._step_applied or after < before, rescaled=after / before)
        return result

    return _take_model_step


def _loss_scale(engine) -> float:
    """Factor of the gradients while they are reduced; 1 without a loss scaler."""
    optimizer = engine.optimizer
    scaler = engine.torch_autocast_z0_gradscaler or getattr(optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        return scaler.get_scale()
    return getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", 1.0)


def _require_configured(engine) -> None:
    """Raise UnsupportedError if `engine` has our key but was made before the plugin was imported."""
    if ATTRIBUTE not in vars(engine) and find_in_deepspeed(engine._config._param_dict) is not None:
        raise UnsupportedError(
            "ncz_plugins.deepspeed was imported after deepspeed.initialize had made this engine, so that "
            f"{DEEPSPEED_KEY} has no effect. Import it before"
        )


def save_compression(original):
    """Replacement of save_checkpoint: saves the state of compression as well."""

    signature = inspect.signature(original)

    def save_checkpoint(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE)
        given = signature.bind(self, *args, **kwargs).arguments
        if compression is not None and given["save_dir"]:  # DeepSpeed refuses an empty one
            tag = given.get("tag")
            tag = f"global_step{self.global_steps}" if tag is None else str(tag)  # DeepSpeed's own default
            # Save before DeepSpeed does: it ends with a barrier, so "latest" never names a checkpoint without our
            # files.
            checkpoint.save(compression.training, os.path.join(given["save_dir"], tag), self.global_steps)
        return original(self, *args, **kwargs)

    return save_checkpoint


def load_compression(original):
    """Replacement of _load_checkpoint: loads the state of compression together with the optimizer's."""

    signature = inspect.signature(original)

    def _load_checkpoint(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE)
        if compression is not None:
            compression.forget_weights()
        result = original(self, *args, **kwargs)
        if compression is not None and result[0] is not None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            options = given.arguments
            if options["load_optimizer_states"] and not options["load_module_only"]:
                folder = os.path.join(options["load_dir"], str(options["tag"]))
                group = self.seq_data_parallel_group
                checkpoint.load(compression.training, folder, self.device, self.global_steps, group)
        return result

    return _load_checkpoint


def close_compression(original):
    """Replacement of destroy: closes the connections first."""

    def destroy(self, *args, **kwargs):
        compression = getattr(self, ATTRIBUTE)
        if compression is not None:
            compression.close()
        return original(self, *args, **kwargs)

    return destroy
