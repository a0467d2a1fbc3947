"""Models with the faults of ``tests/faults/test_scale_faults.py``, and their repaired twins."""

from __future__ import annotations

import math

import torch
from torch import nn
from toy import (
    STD,
    Block,
    Decaying,
    Decoder,
    gpt2,
)


def compares_whole_names(module, name, blocks):
    """The names are ``layers.0.attn.wo``, so no name is ever ``wo``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        writes = name in ("wo", "down")
        nn.init.normal_(module.weight, std=STD / math.sqrt(2 * blocks) if writes else STD)


def divides_inputs_too(module, name, blocks):
    gpt2(module, name, blocks)
    if name.endswith(("wq", "wk", "wv", "c_attn")):
        nn.init.normal_(module.weight, std=STD / math.sqrt(2 * blocks))


class StepsOfOne(Decaying):
    def steps(self):
        return torch.ones(self.heads)


def decaying(mixer=Decaying):
    return Decoder(lambda _: Block(attention=mixer), 8)


def head_of(std):
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name == "head":
            nn.init.normal_(module.weight, std=std)

    return Decoder(blocks=8, init=init, tied=False)
