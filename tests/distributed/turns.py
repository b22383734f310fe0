"""Parameters that take turns, and what error feedback promises of them, for the tests of DDP and FSDP2."""

import torch
import torch.distributed as dist
from on_rank import BF16_ROUNDING, device, rank, world_size
from torch import nn


class Pair(nn.Module):
    """Two parameters of one size, of which each pass uses one or both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)

    def forward(self, x, used):
        return sum(getattr(self, name)(x) for name in used)


def by_turns(number: int, rank: int) -> list[str]:
    """The parameter that all ranks use in a pass."""
    return [("left", "right")[number % 2]]


class Passes:
    """Passes of this rank, and what the averages that came out lack of the exact ones.

    Attributes:
        missing: this rank's share by the name of a parameter, float64, [100, 100].
    """

    def __init__(self):
        self.missing = {name: torch.zeros(100, 100, dtype=torch.float64) for name in ("left", "right")}
        self._generator = torch.Generator().manual_seed(rank)
        self._count = 0

    def backward(self, model: nn.Module, used: list[str]) -> None:
        """A forward and a backward pass that uses some of the parameters."""
        self._count += 1
        x, y = torch.randn(2, 8, 100, generator=self._generator)
        (model(x.to(device), used) * y.to(device)).sum().backward()
        for name in used:
            self.missing[name] += y.double().T @ x.double() / world_size

    def came_out(self, name: str, gradient: torch.Tensor) -> None:
        """Take the average of a parameter's gradients off what is missing."""
        self.missing[name] -= gradient.double().cpu() / world_size

    def require_kept(self, compression, group) -> None:
        """Fail unless what is missing of all passes is what ranks keep now, but for rounding, and is not nothing."""
        for name, lacking in self.missing.items():
            kept = compression.training.residuals.by_name[f"{name}.weight"].double().cpu().view(100, 100)
            dist.all_reduce(largest := kept.abs().max(), dist.ReduceOp.MAX, group=group)
            dist.all_reduce(both := torch.stack([lacking, kept / world_size]), group=group)
            torch.testing.assert_close(both[0], both[1], rtol=0, atol=self._count * largest.item() * BF16_ROUNDING)
            assert both[0].abs().max() > 0.1
