"""Parameters that take turns, and what error feedback promises of them, for the tests of DDP and FSDP2."""

import torch
import torch.distributed as dist
from on_rank import device, rank, world_size
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

    def backward(self, model: nn.Module, used: list[str]) -> None:
        """A forward and a backward pass that uses some of the parameters."""
        x, y = torch.randn(2, 8, 100, generator=self._generator)
        (model(x.to(device), used) * y.to(device)).sum().backward()
        for name in used:
            self.missing[name] += y.double().T @ x.double() / world_size

    def came_out(self, name: str, gradient: torch.Tensor) -> None:
        """Take the average of a parameter's gradients off what is missing."""
        self.missing[name] -= gradient.double().cpu() / world_size

    def require_kept(self, compression, group) -> None:
        """Fail unless what is missing of all passes is what the ranks keep now, and is not nothing."""
        for name, lacking in self.missing.items():
            kept = compression.training.residuals.by_name[f"{name}.weight"].double().cpu().view(100, 100) / world_size
            dist.all_reduce(both := torch.stack([lacking, kept]), group=group)
            torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-4)
            assert both[0].abs().max() > 0.1
