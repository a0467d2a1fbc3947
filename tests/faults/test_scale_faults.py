"""Weights that were drawn at another scale than was meant: said of the parameters, whatever the model then does."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from faulty_scales import StepsOfOne, compares_whole_names, decaying, divides_inputs_too, head_of
from scanned import BATCH, errors, found, parameter, scan, scanned, sites
from torch import nn
from toy import (
    BLOCKS,
    STD,
    VOCABULARY,
    WIDTH,
    Decaying,
    Decoder,
    FunctionalBlock,
    Gpt2Block,
    gpt2,
)

RESIDUAL_STD = STD / math.sqrt(2 * BLOCKS)
EXPECT_GPT2 = {"expect.init": "gpt2"}


# ------------------------------------------------------------------ a scale that was never applied, or to the wrong ones


def test_a_depth_factor_that_was_never_applied_is_named_at_each_residual_projection():
    """huggingface/transformers issue 47458."""
    run = scan(lambda: Decoder(init=compares_whole_names), set=EXPECT_GPT2, batch=BATCH)
    first, last = sites(run)[0], sites(run)[-1]
    assert first.update_ratio == pytest.approx(1.4, rel=0.05)  # .25 where the factor is applied
    assert last.sum_rms == pytest.approx(0.39, rel=0.1)  # .059
    scales = found(run, "PC104")
    assert {one.site.parameter.split(".")[-2] for one in scales} == {"wo", "down"}
    for one in scales:
        assert one.value == pytest.approx(STD, rel=0.03)
        assert one.expected == pytest.approx(RESIDUAL_STD, rel=0.03)


def test_a_depth_factor_on_the_inputs_of_attention_is_named_at_those():
    """facebookresearch/lingua issue 39."""
    run = scan(lambda: Decoder(init=divides_inputs_too), set=EXPECT_GPT2)
    scales = found(run, "PC104")
    assert {one.site.parameter.split(".")[-2] for one in scales} == {"wq", "wk", "wv"}
    for one in scales:
        assert one.value == pytest.approx(RESIDUAL_STD, rel=0.03)
        assert one.expected == pytest.approx(STD, rel=0.03)


def test_the_scheme_that_was_meant_is_silent_where_it_was_applied():
    run = scan(Decoder, set=EXPECT_GPT2, batch=BATCH)
    assert not run.findings
    assert sites(run)[0].update_ratio == pytest.approx(0.25, rel=0.05)


class FunctionalWithoutFactor(FunctionalBlock):
    def drawn(self, outputs, inputs, std):
        return super().drawn(outputs, inputs, max(std, STD))


@pytest.mark.parametrize(
    ("block", "init", "names"),
    [
        (FunctionalWithoutFactor, gpt2, {"w_out", "w_down"}),
        (Gpt2Block, compares_whole_names, {"c_proj", "mlp.c_proj"}),
        (Gpt2Block, divides_inputs_too, {"c_attn"}),
    ],
)
def test_both_are_named_in_other_spellings(block, init, names):
    scales = found(scan(lambda: Decoder(block, init=init), set=EXPECT_GPT2), "PC104")
    assert {".".join(one.site.parameter.removesuffix(".weight").split(".")[2:]) for one in scales} == names


@pytest.mark.parametrize("block", [FunctionalBlock, Gpt2Block])
def test_the_scheme_is_recognised_in_other_spellings(block):
    assert not scan(lambda: Decoder(block), set=EXPECT_GPT2).findings


# ------------------------------------------------------------------ a recurrence with a decay of each head


class Mamba1(Decaying):
    """The bias is that of the projection, left at torch's own draw around 0."""

    def __init__(self):
        super().__init__()
        self.dt_proj = nn.Linear(WIDTH, self.heads)
        del self.dt_bias

    def step_of(self, x):
        return F.softplus(self.dt_proj(x))


class LoggedSteps(Decaying):
    """Another name, and the softplus written out."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(self.heads))
        del self.dt_bias

    def step_of(self, x):
        return torch.log1p(torch.exp(self.dt_proj(x).float() + self.offset))


def test_a_step_bias_left_at_one_is_named():
    """fla-org/flash-linear-attention issue 739: softplus(1) = 1.31 where .001 to .1 is meant."""
    run = scan(lambda: decaying(StepsOfOne))
    (finding,) = found(run, "PC104")
    assert finding.site.parameter.endswith("attn.dt_bias")
    assert finding.value == pytest.approx(math.log1p(math.e), rel=1e-3)
    assert parameter(run, "layers.0.attn.dt_bias").role == "step_bias"


@pytest.mark.parametrize(("mixer", "name"), [(Mamba1, "dt_proj.bias"), (LoggedSteps, "offset")])
def test_so_is_one_in_other_spellings(mixer, name):
    (finding,) = found(scan(lambda: decaying(mixer)), "PC104")
    assert finding.site.parameter.endswith(f"attn.{name}")


def test_step_biases_as_they_are_meant_are_silent():
    run = scanned(decaying)
    assert parameter(run, "layers.0.attn.dt_bias").role == "step_bias"
    assert not found(run, "PC104")
    assert not errors(run)


# ------------------------------------------------------------------ the head


def test_an_untied_head_of_std_one_is_seen_in_loss_and_logits():
    """huggingface/transformers issue 26441: a row of std 1 times an input of RMS 1 gives logits of std sqrt(width)."""
    run = scan(lambda: head_of(1.0))
    assert run.loss.logit_std == pytest.approx(math.sqrt(WIDTH), rel=0.05)
    assert run.loss.value > 6 * math.log(VOCABULARY)
    assert {one.rule for one in run.findings} >= {"PC401", "PC402"}


class BareHead(Decoder):
    """The head is a matrix."""

    def __init__(self):
        super().__init__(blocks=8, tied=False)
        self.head = nn.Parameter(torch.randn(WIDTH, VOCABULARY))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.head


def test_so_is_one_that_is_no_module():
    assert {one.rule for one in scan(BareHead).findings} == {"PC401", "PC402"}


def test_a_head_that_gives_logits_of_std_one_is_silent():
    run = scan(lambda: head_of(WIDTH**-0.5), batch=BATCH)
    assert run.loss.logit_std == pytest.approx(1.0, rel=0.05)
    assert run.loss.value == pytest.approx(math.log(VOCABULARY) + 0.5, abs=0.1)  # independent normal logits: ln V + 1/2
    assert not errors(run)
    assert not found(run, "PC401", "PC402")
