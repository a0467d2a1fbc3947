"""A vision transformer with its own batch and loss: propcheck scan examples/vit.py:build"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import propcheck


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.heads = heads

    def attention(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        q, k, v = self.qkv(x).view(batch, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, patches, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        self.apply(self._init_weights)
        nn.init.trunc_normal_(self.position, std=0.02)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(
    layers: int = 12, width: int = 192, heads: int = 3, size: int = 64, patch: int = 8, classes: int = 100
) -> propcheck.Target:
    """Return the model with a batch of two random images and a cross-entropy loss."""
    model = VisionTransformer(layers, width, heads, size, patch, classes)

    def batch(seed: int) -> Tensor:
        return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))

    def loss(logits: Tensor, images: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.arange(len(images)))

    return propcheck.Target(model, batch=batch, loss=loss)
