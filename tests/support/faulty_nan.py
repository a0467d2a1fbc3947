"""Models with the faults of ``tests/faults/test_nan_faults.py``, and their repaired twins."""

from __future__ import annotations

import math

import torch
from scanned import TOKENS
from toy import (
    VOCABULARY,
    Attention,
    Block,
    Decaying,
    Decoder,
)

import propcheck


class Padded(Decoder):
    """Takes the mask of its padding, which is on the left."""

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & attention_mask[:, None, None].bool()
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.norm(x))


class MaskedBlock(Block):
    def __init__(self, attention):
        super().__init__(attention=attention)

    def forward(self, x, seen):
        x = x + self.attn(self.attn_norm(x), seen)
        return x + self.mlp(self.mlp_norm(x))


class Softmax(Attention):
    """Softmax by hand; a row that sees nothing is nothing but -inf, and its softmax 0/0."""

    hidden = -math.inf

    def forward(self, x, seen):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~seen, self.hidden)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FiniteSoftmax(Softmax):
    hidden = torch.finfo(torch.float32).min


PADDING = 5


def left_padded(attention):
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return propcheck.Target(Padded(lambda _: MaskedBlock(attention), 4), batch={"ids": ids, "attention_mask": mask})


def with_decay_of_two(mixer):
    """Each step multiplies the memory by e^-2: over 64 steps by e^-128, which fp32 has not."""

    class Fixed(mixer):
        def decays(self):
            return torch.ones(self.heads)

        def steps(self):
            return torch.full((self.heads,), math.log(math.expm1(2.0)))

    return Decoder(lambda _: Block(attention=Fixed), blocks=4)


class Factored(Decaying):
    """The decay between two tokens as a product of two factors, one of which overflows."""

    def mix(self, q, k, v, total):
        past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        q, k = q.float() * total.exp().unsqueeze(-1), k.float() * (-total).exp().unsqueeze(-1)
        return (q @ k.transpose(-2, -1)).masked_fill(~past, 0.0) @ v.float()
