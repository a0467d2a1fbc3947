"""Blocks as people write them, and models around them: which the tracer must understand without names."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.execution.passes import execute
from propcheck.measure.site_rows import site_records
from propcheck.targets.target import Target, Task

WIDTH, VOCABULARY, LAYERS, BATCH, TOKENS = 16, 29, 3, 2, 7
NAMES = [f"blocks.{block}.{part}" for block in range(LAYERS) for part in ("attn", "mlp")]
KINDS = ["attention", "mlp"] * LAYERS


class Model(nn.Module):
    """Embedding and positions, blocks, final norm, head."""

    def __init__(self, block, *, final_norm=True, layers=LAYERS, **options):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block(**options) for _ in range(layers))
        self.final = nn.LayerNorm(WIDTH) if final_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class SelfAttention(nn.Module):
    """nanoGPT's."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        y = self.mix(q, k, v)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SoftmaxAttention(SelfAttention):
    def mix(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v


class EinsumAttention(SelfAttention):
    def mix(self, q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class LinearAttention(SelfAttention):
    """Kernel attention, no softmax (arXiv 2006.16236)."""

    def mix(self, q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.transpose(-2, -1) @ v)


class BiasedAttention(SelfAttention):
    """T5's: a look-up of its own is added to the scores, and to make it hard has their very shape."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(2 * TOKENS, self.heads)

    def mix(self, q, k, v):
        tokens = torch.arange(q.shape[2])
        distance = tokens[:, None] - tokens[None, :] + TOKENS
        bias = self.bias(distance).permute(2, 0, 1).expand(q.shape[0], -1, -1, -1)
        return F.softmax(q @ k.transpose(-2, -1) + bias, dim=-1) @ v


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class RMSNorm(nn.Module):
    """By hand; the gain is w, or 1 + w."""

    def __init__(self, *, plus_one=False):
        super().__init__()
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.zeros(WIDTH) if plus_one else torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((1.0 + self.weight.float()) * normed if self.plus_one else self.weight * normed).to(x.dtype)


class PlainNorm(RMSNorm):
    """The same without keepdim, with a division and a power."""

    def forward(self, x):
        return x / ((x * x).mean(dim=-1) + 1e-6)[..., None] ** 0.5 * self.weight


class FoldedNorm(RMSNorm):
    """The same, the gain multiplied into the factor first."""

    def forward(self, x):
        return x * (torch.rsqrt(x.square().mean(-1, True) + 1e-6) * self.weight)


class HandLayerNorm(RMSNorm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class L2Norm(RMSNorm):
    def forward(self, x):
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.weight


class VectorNorm(RMSNorm):
    def forward(self, x):
        return x / x.norm(2, dim=-1, keepdim=True) * WIDTH**0.5 * self.weight


class CountedDimension(RMSNorm):
    def forward(self, x):
        return x / (torch.linalg.vector_norm(x, dim=(2,), keepdim=True) + 1e-6) * self.weight


class FunctionalLayerNorm(RMSNorm):
    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight, None, 1e-5)


class FunctionalRMSNorm(RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-6)


NORMS = {
    "nn.LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "nn.RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "by hand": RMSNorm,
    "by hand, 1 + w": lambda: RMSNorm(plus_one=True),
    "plain": PlainNorm,
    "folded": FoldedNorm,
    "LayerNorm by hand": HandLayerNorm,
    "normalize": L2Norm,
    "vector norm": VectorNorm,
    "counted dimension": CountedDimension,
    "F.layer_norm": FunctionalLayerNorm,
    "F.rms_norm": FunctionalRMSNorm,
}


class Block(nn.Module):
    """Pre-norm; how the sum is written is the subclasses' business."""

    def __init__(self, attention=SelfAttention, mlp=Mlp, norm=NORMS["nn.LayerNorm"]):
        super().__init__()
        self.ln_1, self.ln_2 = norm(), norm()
        self.attn, self.mlp = attention(), mlp()

    def forward(self, x):
        x = self.join(x, self.attn(self.ln_1(x)))
        return self.join(x, self.mlp(self.ln_2(x)))

    def join(self, x, f):
        return x + f


class Reversed(Block):
    def join(self, x, f):
        return f + x


class Augmented(Block):
    def join(self, x, f):
        x += f
        return x


class InPlace(Block):
    def join(self, x, f):
        return x.add_(f)


class IntoUpdate(Block):
    def join(self, x, f):
        f += x
        return f


class Function(Block):
    def join(self, x, f):
        return torch.add(input=x, other=f)


class Post(Block):
    def forward(self, x):
        x = self.ln_1(self.join(x, self.attn(x)))
        return self.ln_2(self.join(x, self.mlp(x)))


def run(build, *, seed=0, memory=1 << 40, loss=None, autocast=None):
    """Scan one pass of a model that takes token ids; return what ``execute`` saw and the rows of its sites."""

    def cross_entropy(logits, inputs):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), inputs[0][:, 1:].flatten())

    def batch(_model, seed):
        return (torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed)),)

    task = Task(lambda: Target(build(), loss=loss or cross_entropy), batch, autocast)
    with Workers(1) as workers:
        one = execute(task, seed, memory=memory, device=torch.device("cpu"), workers=workers)
    return one, site_records(one.sites, seed, one.gradients)


def in_bf16(block):
    """Build a model whose norms read a wider copy of the stream: autograd then lets the stream be changed in place."""
    return Model(block, norm=RMSNorm).bfloat16()


def of(rows, column):
    return [getattr(row, column) for row in rows]


def assert_plain(rows, placement="pre", kinds=KINDS, names=NAMES):
    assert of(rows, "module") == names
    assert of(rows, "sublayer") == kinds
    assert of(rows, "block") == [0, 0, 1, 1, 2, 2]
    assert of(rows, "placement") == [placement] * len(names)
    assert all(row.grad_stream_norm > 0 and row.grad_update_norm > 0 and row.grad_sum_norm > 0 for row in rows)
    assert all(row.param_grad_norm > 0 for row in rows)
