"""Models with the faults of ``tests/faults/test_lost_values.py``, and their repaired twins."""

from __future__ import annotations

import torch
from torch import nn
from toy import (
    Decoder,
    RMSNorm,
    gpt2,
)

DEPTH = 6


class WithScalars(Decoder):
    """A factor on each block's stream as a parameter; the constructor sets it."""

    def __init__(self, *, init_sets_it):
        super().__init__(blocks=DEPTH)
        self.init_sets_it = init_sets_it
        self.resid_lambdas = nn.Parameter(torch.ones(DEPTH))

    def forward(self, ids):
        x = self.embed(ids)
        for scale, layer in zip(self.resid_lambdas, self.layers, strict=True):
            x = layer(scale * x)
        return self.head(self.norm(x))

    def init_weights(self):
        for name, module in self.named_modules():
            gpt2(module, name, DEPTH)
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.init_sets_it:
            nn.init.ones_(self.resid_lambdas)


class WithBuffer(WithScalars):
    """The same factor as a buffer, 1/sqrt(block)."""

    def __init__(self, *, init_sets_it):
        super().__init__(init_sets_it=init_sets_it)
        del self.resid_lambdas
        self.register_buffer("scales", self.made())

    def made(self):
        return torch.arange(1, DEPTH + 1).rsqrt()

    def forward(self, ids):
        x = self.embed(ids)
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + scale * (layer(x) - x)
        return self.head(self.norm(x))

    def init_weights(self):
        init_sets_it, self.init_sets_it = self.init_sets_it, False
        super().init_weights()
        if init_sets_it:
            self.scales.copy_(self.made())


def allocated_later(model, *, init_sets_it):
    with torch.device("meta"):
        made = model(init_sets_it=init_sets_it)
    made.to_empty(device="cpu")
    made.head.weight = made.embed.weight
    made.init_weights()
    return made
