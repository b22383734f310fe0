"""What compression of a model's gradients is known by, whichever way PyTorch shares out the model."""

from __future__ import annotations

import torch

from ..core.runtime.statistics import Statistics
from ..core.training.state import Training


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of what `torch.compile` and Lightning's `Fabric.setup` made of it, in any order."""
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: torch.nn.Module) -> torch.nn.Module | None:
    modules = getattr(model, "_modules", {})  # and no attributes: Fabric's module passes these on to the user's own
    if "_original_module" in modules:  # Fabric's, whose own `_forward_module` is what the strategy has wrapped
        return modules.get("_forward_module")
    return modules.get("_orig_mod")


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
