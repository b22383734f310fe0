"""Base class of what `ddp.compress` and `fsdp.compress` return."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.runtime.statistics import Statistics
from ..core.training.muon import PRESET, warn
from ..core.training.policy import ParameterSlice
from ..core.training.state import Training
from .private import not_traced, wrapped_module


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` and Lightning's `Fabric.setup` wrapped, in any order."""
    while (inner := wrapped_module(model)) is not None:
        model = inner
    return model


class ModelCompression:
    """Compression of one model: state that lasts from one backward pass to the next.

    Attributes:
        training: statistics, parameter names and error-feedback residuals. Saved with a checkpoint.
    """

    def __init__(self, training: Training):
        self.training = training

    @property
    def stats(self) -> Statistics:
        """Statistics. A step is a backward pass that reduces gradients."""
        return self.training.stats

    def state_dict(self) -> dict:
        """State of this rank for a checkpoint: see `Training.state_dict`. Each rank must save its own."""
        return self.training.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` returned on the same rank: see `Training.load_state_dict`."""
        self.training.load_state_dict(state)


class _Watched:
    """A model whose optimizers are looked at in their first steps.

    Args:
        training: that of the model.
        parameters: those of the model that are compressed, by name.
        preset: the remedy.
    """

    def __init__(self, training: Training, parameters: Iterable[tuple[str, Tensor]], preset: str):
        self._preset = preset
        self._training = weakref.ref(training)
        self._parts = {
            id(each): (ParameterSlice(name, each.numel(), shape=tuple(each.shape)), each.dtype)
            for name, each in parameters
        }
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if an optimizer that begins a step trains this model and needs a finer bound.

        Returns whether further steps need not be looked at: the model is gone, or has had a pass, and an optimizer
        repeats a step.
        """
        training = self._training()
        if training is None or (training.step and optimizer in self._seen):
            return True
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            trained = [self._parts.get(id(each)) for group in optimizer.param_groups for each in group["params"]]
            matrices = [each for each in trained if each is not None and each[0].dimensions >= 2]
            warn(optimizer, training.config, matrices, self._preset)
        return False


_watched: list[_Watched] = []
_look_handle = None  # of the hook of all optimizers, which can't remove itself


def watch_first_steps(training: Training, parameters: Iterable[tuple[str, Tensor]], preset: str = PRESET) -> None:
    """Warn in the first steps of optimizers if one of them needs a finer bound. For one rank.

    Args:
        training: that of a model.
        parameters: those of the model that are compressed, by name.
        preset: the remedy.
    """
    global _look_handle
    _watched.append(_Watched(training, parameters, preset))
    if _look_handle is None:
        _look_handle = register_optimizer_step_pre_hook(_look)


@not_traced
def _look(optimizer: torch.optim.Optimizer, *_) -> None:
    if _watched:
        _watched[:] = [each for each in _watched if not each.look(optimizer)]
