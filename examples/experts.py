"""The small GPT with experts in place of its feed-forward networks, shared out over the ranks.

Each token goes to the two experts that a router picks. Its row travels to the rank that has the expert, and the result
travels back: two all-to-alls for each layer in the forward pass, and two in the backward pass.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn

EXPERTS_PER_TOKEN = 2
BALANCE = 0.01  # weight of the loss that keeps the router from sending all tokens to one expert

# (rows, rows that come from each rank, rows that go to each rank) -> the rows that come
Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


class Experts(nn.Module):
    """Mixture of experts (Shazeer et al., 2017), an equal part on each rank: (batch, time, width) to the same shape.

    Args:
        config: sizes of the model.
        count: experts of all ranks.
        exchange: sends rows to ranks; autograd goes through it.

    Attributes:
        balance: the Switch Transformer's load-balancing loss (Fedus et al., 2021) of the last forward pass.
    """

    def __init__(self, config: GPTConfig, count: int, exchange: Exchange):
        super().__init__()
        self.ranks, self.count, self._exchange = dist.get_world_size(), count, exchange
        self.router = nn.Linear(config.width, count, bias=False)
        every = [
            nn.Sequential(
                nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
            )
            for _ in range(count)
        ]
        first = dist.get_rank() * (count // self.ranks)
        self.own = nn.ModuleList(every[first : first + count // self.ranks])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])

        # The router picks experts for each token, and how much each of them counts.
        shares = self.router(tokens).softmax(-1)
        weights, experts = shares.topk(EXPERTS_PER_TOKEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = experts.flatten().bincount(minlength=self.count)
        self.balance = self.count * (counts / counts.sum() * shares.mean(0)).sum()

        # Rows go to the ranks of their experts, ordered by expert. The ranks first say how many.
        order = experts.flatten().argsort(stable=True)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = (each.view(self.ranks, -1).sum(1).tolist() for each in (counts, arriving))
        rows = self._exchange(tokens[order // EXPERTS_PER_TOKEN], received, sent)

        # They come in the order of ranks, and of experts for each rank.
        which = torch.arange(len(self.own)).repeat(self.ranks).repeat_interleave(arriving)
        results = torch.zeros_like(rows)
        for number, expert in enumerate(self.own):
            chosen = (which == number).nonzero().squeeze(1)
            results = results.index_copy(0, chosen, expert(rows[chosen]))

        # The results go back, and are added up for each token.
        back = self._exchange(results, sent, received) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // EXPERTS_PER_TOKEN, back).view_as(x)


class ExpertGPT(GPT):
    """The small GPT with experts in every layer. Its loss includes the load-balancing loss while it trains."""

    def __init__(self, config: GPTConfig, count: int, exchange: Exchange):
        super().__init__(config)
        for block in self.blocks:
            block.mlp = Experts(config, count, exchange).apply(self._initialize)

    def expert_names(self) -> list[str]:
        """Names of the parameters that other ranks do not have."""
        return [name for name, _ in self.named_parameters() if ".mlp.own." in name]

    def forward(self, tokens, targets=None):
        loss = super().forward(tokens, targets)
        if targets is None or not self.training:
            return loss
        return loss + BALANCE * sum(block.mlp.balance for block in self.blocks) / len(self.blocks)
