"""The models that the faults are put into are healthy, and stay so in every spelling."""

from __future__ import annotations

import math

import pytest
from scanned import BATCH, TOKENS, errors, healthy, scan, sites
from torch.nn import functional as F
from toy import BLOCKS, WIDTH, Attention, Block, Decoder, FunctionalBlock, Gpt2Block, ParallelBlock


def block_gradient(run, block):
    return math.hypot(*(one.grad_norm for one in run.record.parameters if one.block == block))


def test_the_toy_has_the_values_that_its_init_gives():
    run = healthy(batch=BATCH)
    first, last = sites(run)[0], sites(run)[-1]
    assert (run.model.blocks, run.model.sites, run.model.placement) == (BLOCKS, 2 * BLOCKS, "pre")
    assert first.sum_rms == pytest.approx(0.021, rel=0.03)
    assert last.sum_rms == pytest.approx(0.059, rel=0.05)  # x3 in 16 blocks: growth by addition, and no fault
    assert first.update_ratio == pytest.approx(0.25, rel=0.05)
    assert last.update_ratio == pytest.approx(0.10, rel=0.1)
    assert block_gradient(run, 0) == pytest.approx(4.7, rel=0.15)
    assert block_gradient(run, BLOCKS - 1) == pytest.approx(1.6, rel=0.15)
    assert run.loss.value == pytest.approx(6.97, abs=0.02)
    assert run.loss.uniform == pytest.approx(6.908, abs=1e-3)
    assert not run.findings


def test_its_first_attention_update_is_that_of_uniform_attention():
    """v has std .02 sqrt(256), a mean over t of them 1/sqrt(t) of it, and the output .02 / sqrt(32) times sqrt(256)."""
    mean_of_inverse = sum(1 / t for t in range(1, TOKENS + 1)) / TOKENS
    expected = 0.02 * math.sqrt(WIDTH) * math.sqrt(mean_of_inverse) * 0.02 / math.sqrt(2 * BLOCKS) * math.sqrt(WIDTH)
    assert sites(healthy(batch=BATCH))[0].update_rms == pytest.approx(expected, rel=0.03)


def test_half_precision_is_close_to_single():
    half, single = healthy(precision="bf16"), healthy()
    for one, other in zip(sites(half), sites(single), strict=True):
        assert one.sum_rms == pytest.approx(other.sum_rms, rel=0.01)
    assert not errors(half)


@pytest.mark.parametrize("block", [Gpt2Block, ParallelBlock, FunctionalBlock])
def test_the_other_spellings_have_the_same_sites_and_no_finding(block):
    run = healthy(block, 8)
    assert [one.sublayer for one in sites(run)] == ["attention", "mlp"] * 8
    assert not run.findings


@pytest.mark.parametrize("block", [Gpt2Block, ParallelBlock, FunctionalBlock])
def test_in_half_precision_they_have_no_error(block):
    run = healthy(block, 8, precision="bf16")
    assert run.model.sites == 16
    assert not errors(run)


class ScaledByWidth(Attention):
    """ViT-CIFAR issue 12: the scores are divided by sqrt(d_model), not by sqrt(d_head)."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(WIDTH))


def test_a_wrong_scale_of_the_scores_cannot_be_seen_and_nothing_is_claimed():
    """Negative control (omihub777/ViT-CIFAR issue 12): at the first step attention is near uniform whatever the scale is."""
    run = scan(lambda: Decoder(lambda _: Block(attention=ScaledByWidth)))
    assert not run.findings
    for one, other in zip(sites(run), sites(healthy()), strict=True):
        assert one.sum_rms == pytest.approx(other.sum_rms, rel=0.02)
        assert one.grad_sum_norm == pytest.approx(other.grad_sum_norm, rel=0.02)
