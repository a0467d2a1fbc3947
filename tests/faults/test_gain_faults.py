"""Gains of norms."""

from __future__ import annotations

import math

import pytest
import torch.nn.functional as F
from faulty_gains import centred, doubled, with_norm
from scanned import found, healthy, norm, scan, scanned, sites
from torch import nn
from toy import (
    WIDTH,
    RMSNorm,
)


def assert_doubled(gains):
    """Assert that the findings are about the norms of all blocks, and say a gain of 2."""
    assert all(one.value == pytest.approx(2.0) for one in gains)
    messages = " ".join(one.message for one in gains)
    assert all(f"layers.*.{name}" in messages for name in ("attn_norm", "mlp_norm"))
    assert "blocks 0 to 7" in messages


def test_a_gain_of_two_in_every_norm_is_found_though_its_weight_is_one():
    """huggingface/transformers issue 40224."""
    run = scanned(doubled)
    for site, factor in ((0, 2.1), (1, 4.3)):  # attention is linear in what it reads, a gated MLP nearly quadratic
        assert sites(run)[site].update_rms / sites(scanned(centred))[site].update_rms == pytest.approx(factor, rel=0.05)
    assert norm(run, "layers.3.attn_norm").gain == pytest.approx(2.0)
    assert_doubled(found(run, "PC106"))


def test_the_same_norm_with_a_weight_of_zero_is_silent():
    run = scanned(centred)
    assert not run.findings
    assert norm(run, "layers.3.attn_norm").gain == pytest.approx(1.0)
    assert sites(run)[0].update_rms == pytest.approx(
        math.sqrt(2) * sites(healthy())[0].update_rms, rel=0.02
    )  # of half the depth


class PlainNorm(RMSNorm):
    """The gain is w, and drawn at 2."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        nn.init.constant_(self.weight, 2.0)


class FunctionNorm(RMSNorm):
    """1 + w again, as an argument of torch's own function."""

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), 1 + self.weight, self.eps)


class CentredLayerNorm(RMSNorm):
    """1 + w, folded into one factor, of a norm that takes the mean away."""

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) * ((self.weight + 1) / (variance + self.eps).sqrt())


@pytest.mark.parametrize("norm_class", [PlainNorm, FunctionNorm, CentredLayerNorm])
def test_so_is_a_gain_of_two_in_other_spellings(norm_class):
    assert_doubled(found(scan(lambda: with_norm(norm_class)), "PC106"))
