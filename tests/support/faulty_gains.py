"""Models with the faults of ``tests/faults/test_gain_faults.py``, and their repaired twins."""

from __future__ import annotations

import torch
from torch import nn
from toy import (
    WIDTH,
    Block,
    Decoder,
    RMSNorm,
)


class CentredNorm(RMSNorm):
    """The gain is 1 + w."""

    first = 0.0

    def __init__(self, width=WIDTH):
        super().__init__(width)
        nn.init.constant_(self.weight, self.first)

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class DoubledNorm(CentredNorm):
    first = 1.0


def with_norm(norm_class):
    return Decoder(lambda _: Block(norm=norm_class), 8, norm=norm_class)


def centred():
    return with_norm(CentredNorm)


def doubled():
    return with_norm(DoubledNorm)
