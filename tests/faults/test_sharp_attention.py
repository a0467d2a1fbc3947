"""Attention with large logits, by its products and by a bias; and a gate that reads the bare stream, as it is meant to."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from scanned import found, scan, sites
from torch import nn
from toy import WIDTH, Attention, Block, Decoder, linear

SLOPES, LONG = (0.5, 0.25), 2300


class DistanceBias(Attention):
    """ALiBi (arXiv 2108.12409) with its two steepest slopes of eight."""

    def __init__(self):
        super().__init__(heads=len(SLOPES))

    def mix(self, q, k, v):
        at = torch.arange(q.shape[-2])
        bias = torch.tensor(SLOPES).view(-1, 1, 1) * (at - at[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(bias > 0, -math.inf))


def test_a_bias_by_distance_over_a_long_context_is_no_sharp_attention():
    run = scan(lambda: Decoder(lambda _: Block(attention=DistanceBias), blocks=1), tokens=LONG)
    attention = sites(run)[0]
    assert attention.attention_logit_absmax == pytest.approx(0.5 * (LONG - 1), rel=0.01)  # beyond the limit of the rule
    # The entropy of a geometric distribution, cut off at the first token, over ln of the keys that a query sees.
    kept = [sum(_geometric(m, n) for m in SLOPES) / len(SLOPES) / math.log(n) for n in range(2, LONG + 1)]
    assert attention.attention_entropy == pytest.approx(sum(kept) / len(kept), rel=0.01)
    assert not found(run, "PC402")


def _geometric(slope, keys):
    weights = torch.arange(keys, dtype=torch.float64).mul(-slope).softmax(0)
    return float(torch.special.entr(weights).sum())


class Unscaled(Attention):
    """Queries and keys of RMS 8 in heads of 64, without the 1 / sqrt(64): logits of RMS 8 x 8 x 8."""

    def __init__(self):
        super().__init__()
        self.wq.large = self.wk.large = True

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def large_queries(module, name, blocks):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.5 if hasattr(module, "large") else 0.02)


def test_products_that_were_not_scaled_are_sharp_and_no_more_than_that_is_said():
    run = scan(lambda: Decoder(lambda _: Block(attention=Unscaled), blocks=2, init=large_queries))
    assert sites(run)[0].attention_logit_rms == pytest.approx(512, rel=0.15)
    (finding,) = found(run, "PC402")
    assert (finding.severity, finding.site.sublayer) == ("warning", "attention")
    assert "concentrate on few keys" in finding.message
    # Saturated or not, gradients do reach queries and keys.
    assert all(p.grad_norm > 0 for p in run.record.parameters if p.name.endswith(("wq.weight", "wk.weight")))
    assert "gradient" not in finding.message


class Highway(Block):
    """Srivastava 2015, arXiv 1505.00387: the gate reads the stream as it is."""

    def __init__(self):
        super().__init__()
        self.transform = linear(WIDTH, WIDTH)

    def forward(self, x):
        gate = torch.sigmoid(self.transform(x) - 2)
        x = (1 - gate) * x + gate * self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def test_a_gate_on_the_bare_stream_is_a_note_at_most():
    run = scan(lambda: Decoder(Highway, blocks=4))
    assert any(one.bare_read for one in sites(run))
    (finding,) = found(run, "PC106")
    assert finding.severity == "note"
    assert "A gate or a router may do this on purpose" in finding.message
