"""A small model under Horovod, and values. Imports nothing of ncz_plugins: a user's script does not either."""

import hashlib

import horovod.torch as hvd
import torch
from torch import Tensor, nn

INPUTS, OUTPUTS, BATCH = 31, 7, 4


class Branches(nn.Module):
    """A small model of odd sizes, whose middle is the sum of the branches that are asked for, in that order."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(INPUTS, 257)
        self.a = nn.Linear(257, 129)
        self.b = nn.Linear(257, 129)
        self.exit = nn.Linear(129, OUTPUTS)

    def forward(self, inputs: Tensor, branches: str = "ab") -> Tensor:
        hidden = nn.functional.gelu(self.entry(inputs))
        return self.exit(sum(getattr(self, name)(hidden) for name in branches))


def new_model(dtype: torch.dtype = torch.float32) -> Branches:
    """Always with the same initial weights."""
    torch.manual_seed(0)
    return Branches().to(dtype)


def wrapped(model: nn.Module, compression, prefix: str = "", **arguments):
    """SGD for all parameters, whose names begin with `prefix`, under Horovod."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    names = [(prefix + name, p) for name, p in model.named_parameters()]
    return hvd.DistributedOptimizer(sgd, names, compression=compression, **arguments)


def loss_of(model: nn.Module, number: int, **how) -> Tensor:
    """The loss on this rank's own batch of that number."""
    random = torch.Generator().manual_seed(1000 * hvd.rank() + number)
    inputs = torch.randn(BATCH, INPUTS, generator=random, dtype=torch.float32)
    targets = torch.randn(BATCH, OUTPUTS, generator=random, dtype=torch.float32)
    like = next(model.parameters())
    return nn.functional.mse_loss(model(inputs.to(like), **how).float(), targets.to(like.device))


def own_values(shape, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed values of this rank; integers from -9 to 9 where `dtype` holds such."""
    random = torch.Generator().manual_seed(1000 * hvd.rank() + number)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=torch.float32).to(dtype)
    return torch.randint(-9, 10, torch.Size([shape] if isinstance(shape, int) else shape), generator=random).to(dtype)


def gradients(model: nn.Module) -> list[Tensor]:
    """Dense copies of all gradients."""
    return [(p.grad.to_dense() if p.grad.is_sparse else p.grad).clone() for p in model.parameters()]


def largest(tensors) -> float:
    return max((t.double().abs().max().item() for t in tensors if t.numel()), default=0.0)


def largest_error(ours, plain) -> float:
    assert len(ours) == len(plain) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, plain))
    return largest([a.double() - b.double() for a, b in zip(ours, plain)])


def sha256(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
