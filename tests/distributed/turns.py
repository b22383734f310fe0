"""Parameters that take turns, and the promise of error feedback about them, for the tests of DDP and FSDP2."""

import torch
import torch.distributed as dist
from torch import nn


class Pair(nn.Module):
    """Two parameters of one size, of which each pass uses one or both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)

    def forward(self, x, used):
        return sum(getattr(self, name)(x) for name in used)


def require_kept(missing: dict[str, torch.Tensor], compression, group) -> None:
    """Fail unless what is missing from the averages of all passes is what the ranks keep now, and is not nothing.

    Args:
        missing: this rank's share of it by the name of a layer, float64, [100, 100].
    """
    world_size = dist.get_world_size(group)
    for name, lacking in missing.items():
        kept = compression.training.residuals.by_name[f"{name}.weight"].double().cpu().view(100, 100) / world_size
        dist.all_reduce(both := torch.stack([lacking, kept]), group=group)
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-4)
        assert both[0].abs().max() > 0.1
