"""The first operation that makes a NaN or an infinity."""

from __future__ import annotations

import math

import pytest
import torch
from scanned import TOKENS, errors, found, scan
from toy import (
    VOCABULARY,
    Attention,
    Block,
    Decaying,
    Decoder,
)

import propcheck

# ------------------------------------------------------------------ rows of attention that see nothing


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


class ExpAndSum(Softmax):
    """The same with the softmax written out."""

    def forward(self, x, seen):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~seen, self.hidden)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.wo((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


class FiniteSoftmax(Softmax):
    hidden = torch.finfo(torch.float32).min


PADDING = 5


def left_padded(attention):
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return propcheck.Target(Padded(lambda _: MaskedBlock(attention), 4), batch={"ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(("attention", "function"), [(Softmax, "softmax"), (ExpAndSum, "sub")])
def test_a_row_of_attention_that_sees_nothing_is_found_with_its_tokens(attention, function):
    """pytorch/pytorch issue 103749: with padding on the left its first queries see padding alone."""
    run = scan(lambda: left_padded(attention))
    (finding,) = found(run, "PC209")
    assert (finding.severity, finding.site.block, finding.site.sublayer) == ("error", 0, "attention")
    (origin,) = (one for one in run.record.origins if one.direction == "forward")
    assert (origin.value, origin.block) == ("NaN", 0)
    assert function in origin.function
    assert origin.module.startswith("layers.0.attn")
    assert origin.tokens == tuple(range(PADDING))
    assert function in finding.message


def test_hiding_with_the_least_finite_number_is_silent():
    run = scan(lambda: left_padded(FiniteSoftmax))
    assert not run.record.origins
    assert not errors(run)


# ------------------------------------------------------------------ exponentials of sums


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


def test_factors_of_a_decay_that_overflow_are_found_at_the_first_mixer():
    """pytorch/executorch issue 21417: exp(-cumsum) is infinite, exp(cumsum) is 0, and their product is NaN."""
    run = scan(lambda: with_decay_of_two(Factored))
    (finding,) = found(run, "PC209")
    assert (finding.severity, finding.site.block, finding.site.site) == ("error", 0, 0)
    (origin,) = (one for one in run.record.origins if one.direction == "forward")
    assert (origin.value, origin.function, origin.block) == ("infinity", "exp", 0)
    assert origin.module.startswith("layers.0.attn")


def test_exponentials_of_differences_are_silent():
    run = scan(lambda: with_decay_of_two(Decaying))
    assert not run.record.origins
    assert not errors(run)
