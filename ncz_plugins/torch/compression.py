"""Base class of what `ddp.compress` and `fsdp.compress` return."""

from __future__ import annotations

import torch

from ..core.runtime.statistics import Statistics
from ..core.training.state import Training
from .private import wrapped_module


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
