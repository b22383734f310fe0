"""What compression of a model's gradients is known by, whichever way PyTorch shares out the model."""

from __future__ import annotations

import torch

from ..core.runtime.statistics import Statistics
from ..core.training.state import Training


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, if it made this one."""
    return getattr(model, "_orig_mod", model)


def name_of(name: str) -> str:
    """The name of a module or parameter without what `torch.compile` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class ModelCompression:
    """What lasts from one backward pass to the next.

    Attributes:
        training: counts, names, error feedback; is saved with a checkpoint.
    """

    def __init__(self, training: Training):
        self.training = training

    @property
    def stats(self) -> Statistics:
        """What was counted. A step is a backward pass that reduces gradients."""
        return self.training.stats

    def state_dict(self) -> dict:
        """What this rank needs to go on as if it had not been stopped: see `Training.state_dict`. Ranks differ."""
        return self.training.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave to the same rank: see `Training.load_state_dict`."""
        self.training.load_state_dict(state)
