"""The toy's decoder as others might rewrite it: the same function of the same weights, in other words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import VOCABULARY, WIDTH, Attention, Block, Decoder, RMSNorm, SwiGLU, gpt2, linear

# ------------------------------------------------------------------ under the same names


class InOtherOrder(Block):
    """What is registered first is drawn first, by generators that are one after the other."""

    def __init__(self):
        nn.Module.__init__(self)
        self.mlp, self.mlp_norm, self.attn, self.attn_norm = SwiGLU(), RMSNorm(), Attention(), RMSNorm()


class AddedInPlace(Block):
    def forward(self, x):
        total = self.attn(self.attn_norm(x))
        total += x
        update = self.mlp(self.mlp_norm(total))
        return update.add_(total)


class ResidualLast(Block):
    def forward(self, x):
        residual, x = x, self.attn(self.attn_norm(x))
        residual = x + residual
        return torch.add(self.mlp(self.mlp_norm(residual)), residual)


class InMethods(Block):
    def attend(self, x):
        return self.attn(self.attn_norm(x))

    def feed(self, x):
        return self.mlp(self.mlp_norm(x))

    def forward(self, x):
        for branch in (self.attend, self.feed):
            x = x + branch(x)
        return x


class WithTheFunctions(Block):
    """The modules hold the weights, and are not called."""

    def forward(self, x):
        h = F.rms_norm(x, (WIDTH,), self.attn_norm.weight, self.attn_norm.eps)
        a = self.attn
        q, k, v = (a.split(h @ one.weight.T) for one in (a.wq, a.wk, a.wv))
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), a.wo.weight)
        h = F.rms_norm(x, (WIDTH,), self.mlp_norm.weight, self.mlp_norm.eps)
        m = self.mlp
        return x + F.linear(F.silu(F.linear(h, m.gate.weight)) * F.linear(h, m.up.weight), m.down.weight)


class Softmax(Attention):
    """The attention by hand."""

    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class WithBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)


class InSequence(Decoder):
    """A Sequential numbers what is in it as a ModuleList does."""

    def __init__(self, blocks=8):
        super().__init__(blocks=blocks)
        self.layers = nn.Sequential(*self.layers)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.embed(ids))))


class HeadFirst(Decoder):
    """The head is registered first, and the embedding has its weight."""

    def __init__(self, blocks=8):
        nn.Module.__init__(self)
        self.head, self.norm = linear(WIDTH, VOCABULARY), RMSNorm()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed.weight = self.head.weight
        for name, module in self.named_modules():
            gpt2(module, name, blocks)


class Sliced(Decoder):
    """The blocks come in two halves, and a function runs them."""

    def __init__(self, blocks=8):
        super().__init__(blocks=blocks)

    def forward(self, ids):
        x = self.embed(ids)
        half = len(self.layers) // 2
        for part in (self.layers[:half], self.layers[half:]):
            x = run(part, x)
        return F.linear(self.norm(x), self.embed.weight)


def run(blocks, x):
    for block in blocks:
        x = block(x)
    return x


# ------------------------------------------------------------------ under other names, so that the weights are other draws


class Renamed(nn.Module):
    """Llama's names."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.feed_forward = Projections(), SwiGLU()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.feed_forward(self.post_attention_layernorm(x))


class Projections(Attention):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        del self.wq, self.wk, self.wv, self.wo

    def forward(self, x):
        mixed = self.mix(self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x)))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    """One matrix for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        del self.wq, self.wk, self.wv

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.wo(self.mix(self.split(q), self.split(k), self.split(v)).transpose(1, 2).flatten(2))


class FusedMlp(SwiGLU):
    """One matrix for gate and value."""

    def __init__(self):
        super().__init__()
        self.gate_up = linear(WIDTH, 8 * WIDTH)
        del self.gate, self.up

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FusedBoth(Block):
    def __init__(self):
        super().__init__(attention=Fused)
        self.mlp = FusedMlp()


class InBranches(nn.Module):
    """A helper holds a norm and what it is for."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([Branch(Attention()), Branch(SwiGLU())])

    def forward(self, x):
        for branch in self.branches:
            x = branch(x)
        return x


class Branch(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = RMSNorm(), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Wrapped(nn.Module):
    """The whole model as a part of another one."""

    def __init__(self, blocks=8):
        super().__init__()
        self.backbone = Decoder(blocks=blocks)

    def forward(self, ids):
        return self.backbone(ids)
