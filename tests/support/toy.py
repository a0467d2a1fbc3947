"""A small decoder as people write it by hand, and its block in other spellings. Nothing of propcheck is used here.

A fault is a class that differs from one of these in the line that was wrong. ``Decoder(Faulty)`` has it in every block, and
``Decoder(only(5, Faulty))`` in block 5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, BLOCKS, VOCABULARY, STD = 256, 4, 16, 1000, 0.02


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        mixed = self.mix(self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x)))
        return self.wo(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, norm=RMSNorm, attention=Attention):
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = norm(), attention(), norm(), SwiGLU()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def only(index, faulty, healthy=Block):
    """Give what makes the blocks of a decoder in which one is faulty."""
    return lambda i: (faulty if i == index else healthy)()


RESIDUAL = ("wo", "down", "c_proj", "fc_out", "out")  # the last name part of what writes into the stream


def gpt2(module, name, blocks):
    """Initialise with std .02, residual projections divided by sqrt(2 x blocks)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        std = STD / math.sqrt(2 * blocks) if name.rpartition(".")[2] in RESIDUAL else STD
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Decoder(nn.Module):
    def __init__(self, block=Block, blocks=BLOCKS, *, norm=RMSNorm, init=gpt2, tied=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() if isinstance(block, type) else block(i) for i in range(blocks))
        self.norm, self.head = norm(), linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight
        for name, module in self.named_modules():
            init(module, name, blocks)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Decaying(nn.Module):
    """Attention whose weights decay with the distance, as fast as the head says: a state-space mixer in its parallel form."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.dt_proj = linear(WIDTH, heads)
        self.A_log = nn.Parameter(self.decays().log())
        self.dt_bias = nn.Parameter(self.steps())

    def decays(self):
        return torch.empty(self.heads).uniform_(1, 16)

    def steps(self):
        """Draw steps between .001 and .1, and undo the softplus that comes after."""
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(0.001), math.log(0.1)))
        return step + torch.log(-torch.expm1(-step))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.in_proj(x).chunk(3, -1))
        total = (-self.A_log.float().exp() * self.step_of(x)).cumsum(1).transpose(1, 2)
        return self.out(self.mix(q, k, v, total).to(x.dtype).transpose(1, 2).flatten(2))

    def step_of(self, x):
        return F.softplus(self.dt_proj(x).float() + self.dt_bias.float())

    def mix(self, q, k, v, total):
        """``total`` is the logarithm of the decay from the start to each token, [batch, heads, tokens]."""
        past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~past, -math.inf).exp()
        return ((q @ k.transpose(-2, -1)).float() * decay) @ v.float()


# ------------------------------------------------------------------ the same block, written by others


class Gpt2Block(nn.Module):
    """LayerNorm, biases, one matrix for q, k and v, GELU, the residual last."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def mix(self, h):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(h).chunk(3, dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def feed(self, h):
        return self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](h)))

    def attend(self, residual):
        return self.mix(self.ln_1(residual)) + residual

    def forward(self, residual):
        residual = self.attend(residual)
        return self.feed(self.ln_2(residual)) + residual


class ParallelBlock(Gpt2Block):
    """GPT-J's: one norm, attention and MLP beside each other."""

    def __init__(self):
        super().__init__()
        del self.ln_2

    def forward(self, x):
        h = self.ln_1(x)
        return x + self.mix(h) + self.feed(h)


class FunctionalBlock(nn.Module):
    """No submodules: parameters and functions, and sums that are made in the update's place."""

    def __init__(self):
        super().__init__()
        small = STD / math.sqrt(2 * BLOCKS)
        self.gain = nn.Parameter(torch.ones(2, WIDTH))
        self.w_in, self.w_out = self.drawn(3 * WIDTH, WIDTH, STD), self.drawn(WIDTH, WIDTH, small)
        self.w_up, self.w_down = self.drawn(4 * WIDTH, WIDTH, STD), self.drawn(WIDTH, 4 * WIDTH, small)

    def drawn(self, outputs, inputs, std):
        return nn.Parameter(torch.randn(outputs, inputs) * std)

    def attention(self, x):
        h = F.rms_norm(x, (WIDTH,), self.gain[0])
        q, k, v = (h @ self.w_in.T).view(*h.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2) @ self.w_out.T

    def feed_forward(self, x):
        h = F.rms_norm(x, (WIDTH,), self.gain[1])
        return F.relu(h @ self.w_up.T) @ self.w_down.T

    def attend(self, x):
        total = self.attention(x)
        total += x
        return total

    def forward(self, x):
        x = self.attend(x)
        total = self.feed_forward(x)
        total += x
        return total
