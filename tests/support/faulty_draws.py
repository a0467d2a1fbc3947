"""Models with the faults of ``tests/faults/test_draw_faults.py``, and their repaired twins."""

from __future__ import annotations

import math

import torch
from torch import nn
from toy import (
    STD,
    Block,
    Decaying,
    Decoder,
)


class DrawnInHalf(Decaying):
    def decays(self):
        return torch.empty(self.heads, dtype=torch.bfloat16).uniform_(0, 16)


class DrawnInSingle(Decaying):
    def decays(self):
        return torch.empty(self.heads).uniform_(0.01, 16)


def many_heads(mixer):
    """16 blocks of 128 heads."""
    return Decoder(lambda _: Block(attention=lambda: mixer(heads=128)))


def truncated_normal(tensor, std):
    """Draw by the inverse error function, cut at -2 and 2, all in the tensor's own dtype."""
    lower, upper = (1 + math.erf(-2 / std / math.sqrt(2))) / 2, (1 + math.erf(2 / std / math.sqrt(2))) / 2
    with torch.no_grad():
        tensor.uniform_(2 * lower - 1, 2 * upper - 1).erfinv_().mul_(std * math.sqrt(2)).clamp_(-2, 2)


def truncated_in_place(module, name, blocks):
    if isinstance(module, nn.Linear | nn.Embedding):
        truncated_normal(module.weight, STD)


def truncated_in_single(module, name, blocks):
    if isinstance(module, nn.Linear | nn.Embedding):
        wide = torch.empty(module.weight.shape, dtype=torch.float32)
        truncated_normal(wide, STD)
        with torch.no_grad():
            module.weight.copy_(wide)


def in_bf16(init):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Decoder(blocks=4, init=init)
    finally:
        torch.set_default_dtype(torch.float32)
