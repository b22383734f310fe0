"""Optimizers with the settings that people give them, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WARM_UP = 0.1  # of the steps, in which the learning rate rises; then it falls to a tenth, as a cosine does

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
LION = {"lr": 2e-4, "betas": (0.9, 0.99), "weight_decay": 0.5}


class Lion(torch.optim.Optimizer):
    """Moves each weight by the sign of a momentum (Chen et al., 2023, arXiv 2302.06675, program 2).

    Its authors advise a rate a third to a tenth of AdamW's, and a weight decay that is larger by as much.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (to_move, to_keep) = group["lr"], group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - to_move).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
                momentum.lerp_(weight.grad, 1 - to_keep)


class Float32Products(TorchDispatchMode):
    """Multiplies matrices of bfloat16 in float32, and rounds what comes out."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return function(*arguments, **(named or {}))
        result = function(*(each.float() for each in arguments), **(named or {}))
        return result.to(arguments[0].dtype)


class Muon(torch.optim.Muon):
    """torch's. Where the CPU has no instructions for bfloat16, in which it multiplies, float32 is 100 times as fast.

    Updates differ by 0.4 %. Rounding to bfloat16 moves both by 1.5 % from exact ones.
    """

    @torch.no_grad()
    def step(self) -> None:
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        is_on_cpu = all(weight.is_cpu for group in self.param_groups for weight in group["params"])
        with Float32Products() if is_on_cpu and not has_bfloat16 else nullcontext():
            super().step()


def rate(step: int, steps: int) -> float:
    """Of the learning rate, in a step."""
    warm = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def optimizers(name: str, weights: Mapping[str, Tensor], sgd_rate: float) -> list[torch.optim.Optimizer]:
    """What trains named weights. Muon takes the matrices of the layers, and AdamW the rest, as its authors advise.

    A number after AdamW or Lion is another learning rate: "AdamW 0.003".
    """
    name, _, other = name.partition(" ")
    if name == "AdamW":
        return [torch.optim.AdamW(weights.values(), **ADAMW | ({"lr": float(other)} if other else {}))]
    if name == "Lion":
        return [Lion(weights.values(), **LION | ({"lr": float(other)} if other else {}))]
    if name == "SGD":
        return [torch.optim.SGD(weights.values(), lr=sgd_rate, momentum=0.9)]
    of_layers = [key for key, weight in weights.items() if is_of_muon(key, weight.shape)]
    matrices, rest = [weights[key] for key in of_layers], [weights[key] for key in weights if key not in of_layers]
    muon = Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, **ADAMW)]


def is_of_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon trains a parameter: the matrices of the layers."""
    return len(shape) == 2 and name.startswith("blocks.")
