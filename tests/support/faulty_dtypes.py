"""Models with the faults of ``tests/faults/test_dtype_faults.py``, and their repaired twins."""

from __future__ import annotations

import torch
from torch import nn
from toy import (
    Attention,
    Block,
    Decoder,
    RMSNorm,
    gpt2,
)


class HalfNorm(RMSNorm):
    """The squares are taken in the dtype of the input: those of numbers above 256 are infinite in fp16."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def large(block, norm=RMSNorm):
    """An embedding of std 300."""

    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name == "embed":
            nn.init.normal_(module.weight, std=300)

    return Decoder(block, 8, norm=norm, init=init, tied=False)


HALF = {"precision": "fp16", "tokens": 16, "batch": 1}  # products in fp16 are slow on a CPU


class Rotary(Attention):
    """Heads of 128; positions are rotations, whose tables were made in the model's dtype."""

    made_in = torch.bfloat16

    def __init__(self):
        super().__init__(heads=2)
        cos, sin = self.tables()
        self.register_buffer("cos", cos.to(torch.bfloat16))
        self.register_buffer("sin", sin.to(torch.bfloat16))

    def tables(self, positions=2048, size=128):
        frequencies = 10000 ** -(torch.arange(0, size, 2, dtype=self.made_in) / size)
        angles = torch.outer(torch.arange(positions, dtype=self.made_in), frequencies)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def turned(self, x):
        first, second = x.chunk(2, -1)
        tokens = x.shape[2]
        return x * self.cos[:tokens] + torch.cat([-second, first], -1) * self.sin[:tokens]

    def mix(self, q, k, v):
        return super().mix(self.turned(q), self.turned(k), v)


class SingleRotary(Rotary):
    made_in = torch.float32


def rotating(attention):
    return Decoder(lambda _: Block(attention=attention), blocks=4)


class CastingNorm(RMSNorm):
    """Gives the dtype of its weight, so that a stream in fp32 is not noticed."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(self.weight.dtype) * self.weight


class ScaledBlock(Block):
    """The stream times a number that is learned, and that is kept in fp32."""

    kept = torch.float32

    def __init__(self):
        super().__init__(norm=CastingNorm)
        self.resid_lambda = nn.Parameter(torch.ones(1, dtype=self.kept))

    def forward(self, x):
        return super().forward(self.resid_lambda * x)


class ScaledInHalf(ScaledBlock):
    kept = torch.bfloat16


def in_bf16(block):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Decoder(block, 8, norm=CastingNorm)
    finally:
        torch.set_default_dtype(torch.float32)
