"""A small byte-level GPT in plain torch: the one model that every example, under every framework, trains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The defaults give 1.9 M parameters; ``layers=8, heads=8, width=512`` gives 25 M."""

    vocabulary: int = 256  # bytes are the tokens
    context: int = 128  # tokens seen at once
    layers: int = 4
    heads: int = 6
    width: int = 192

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then a feed-forward network of four times the width."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2's decoder (Radford et al., 2019) with the token embedding shared by input and output."""

    def __init__(self, config: GPTConfig | None = None):
        super().__init__()
        self.config = config = config or GPTConfig()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)
        for block in self.blocks:  # keeps the residual stream's variance independent of the depth
            for last in (block.attention.projection, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None):
        """Predict each next token.

        tokens: int64, (batch, time), time at most ``config.context``; targets: the same shape, or None.
        Returns logits (batch, time, vocabulary) in the parameters' dtype, or, where targets are given, the mean
        cross-entropy in nats per token (a float32 scalar).
        """
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens are more than the model's context of {self.config.context}")
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def parameter_count(self) -> int:
        """Number of trained scalars (the shared embedding counted once)."""
        return sum(p.numel() for p in self.parameters())
