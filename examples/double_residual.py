"""A small GPT with a planted fault: its feed-forward network adds the residual that its block adds again."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    def __init__(self, width: int, *, fixed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return update if self.fixed else x + update  # the fault: Block adds x too


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fixed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = FeedForward(width, fixed=fixed)
        self.heads = heads

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, tokens, width / heads]
        update: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return update

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, *, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads=4, fixed=fixed) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(layers: int = 12, width: int = 256, vocabulary: int = 1024, *, fixed: bool = False) -> GPT:
    """Return the model, with its fault or, with ``fixed=True``, without."""
    return GPT(layers, width, vocabulary, fixed=fixed)
