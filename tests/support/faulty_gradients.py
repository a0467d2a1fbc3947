"""Models with the faults of ``tests/faults/test_gradient_faults.py``, and their repaired twins."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import BLOCKS, WIDTH, Attention, Block, Decoder, gpt2, linear


class NormedScores(Attention):
    """Queries and keys of length 1, times scales that are learned."""

    def __init__(self):
        super().__init__()
        self.q_scale, self.k_scale = (
            nn.Parameter(torch.ones(WIDTH // self.heads)),
            nn.Parameter(torch.ones(WIDTH // self.heads)),
        )

    def mix(self, q, k, v):
        q, k = F.normalize(q, dim=-1) * self.q_scale, F.normalize(k, dim=-1) * self.k_scale
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=10.0)


class ForgetsScales(NormedScores):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, is_causal=True, scale=10.0)


class Checkpointed(Decoder):
    """The blocks alone are trained; each is computed again in the backward pass."""

    reentrant = True

    def __init__(self):
        super().__init__(blocks=8)
        for part in (self.embed, self.norm, self.head):
            part.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class CheckpointedWithoutReentry(Checkpointed):
    reentrant = False


class Adapted(nn.Module):
    """W x + B A x, W frozen (LoRA, arXiv 2106.09685): A is drawn, B is zero."""

    def __init__(self, rank=8):
        super().__init__()
        self.base = linear(WIDTH, WIDTH)
        self.lora_A, self.lora_B = linear(WIDTH, rank), linear(rank, WIDTH)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class AdaptedAttention(Attention):
    def __init__(self, adapted=Adapted):
        super().__init__()
        self.wq, self.wv = adapted(), adapted()


def adapted(zero, adapter=Adapted):
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if isinstance(module, nn.Linear) and name.endswith(zero):
            nn.init.zeros_(module.weight)

    model = Decoder(lambda _: Block(attention=lambda: AdaptedAttention(adapter)), 8, init=init)
    for name, one in model.named_parameters():
        one.requires_grad_("lora_" in name or "inner" in name or "outer" in name)
    return model


class Kernel(torch.autograd.Function):
    """Stands for a fused attention: forward is right, its backward is a factor off."""

    @staticmethod
    def forward(ctx, mixed, factor):
        ctx.factor = factor
        return mixed.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class WrongBackward(Attention):
    factor = 6000.0  # with a stream of RMS 1 the branch has a gain of about 1/60

    def mix(self, q, k, v):
        return Kernel.apply(super().mix(q, k, v), self.factor)


class RightBackward(WrongBackward):
    factor = 1.0


def of_unit_stream(attention, blocks):
    def init(module, name, depth):
        gpt2(module, name, BLOCKS)
        if name == "embed":
            nn.init.normal_(module.weight)

    return Decoder(lambda _: Block(attention=attention), blocks, init=init, tied=False)
