"""Optimizers with the settings that people give them, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

WARM_UP = 0.1  # of the steps, in which the learning rate rises; then it falls to a tenth, as a cosine does

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rate(step: int, steps: int) -> float:
    """Of the learning rate, in a step."""
    warm = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def optimizers(name: str, weights: Mapping[str, Tensor], sgd_rate: float) -> list[torch.optim.Optimizer]:
    """What trains named weights. Muon takes the matrices of the layers, and AdamW the rest, as its authors advise."""
    if name == "AdamW":
        return [torch.optim.AdamW(weights.values(), **ADAMW)]
    if name == "SGD":
        return [torch.optim.SGD(weights.values(), lr=sgd_rate, momentum=0.9)]
    of_layers = [key for key, weight in weights.items() if weight.ndim == 2 and key.startswith("blocks.")]
    matrices, rest = [weights[key] for key in of_layers], [weights[key] for key in weights if key not in of_layers]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, **ADAMW)]
