"""Draws that half precision breaks."""

from __future__ import annotations

import math

import pytest
import torch
from faulty_draws import (
    DrawnInHalf,
    DrawnInSingle,
    in_bf16,
    many_heads,
    truncated_in_place,
    truncated_in_single,
)
from scanned import errors, found, parameter, scan, sites
from toy import (
    STD,
    Decaying,
)


class DrawnByRand(Decaying):
    """The same by another call: a product whose first factor is exactly 0 once in 256 draws."""

    def decays(self):
        return 16 * torch.rand(self.heads, dtype=torch.bfloat16)


def test_decays_whose_logarithm_is_minus_infinity_are_counted_though_everything_is_finite():
    """huggingface/transformers issue 47831: uniform_ in bf16 gives exactly 0 once in 512 draws."""
    run = scan(lambda: many_heads(DrawnInHalf))
    bad = [one for one in run.record.parameters if one.nonfinite]
    assert bad
    assert all(one.name.endswith("A_log") for one in bad)
    amount = sum(one.nonfinite for one in bad)
    assert amount == pytest.approx(2048 / 512, abs=8)  # the mean of a binomial, and four of its standard deviations
    assert all(one.nonfinite == 0 for one in sites(run))
    assert math.isfinite(run.loss.value)
    (finding,) = found(run, "PC101")
    assert (finding.severity, finding.site.parameter, finding.value) == ("error", bad[0].name, amount)
    assert "layers.*.attn.A_log" in finding.message
    assert "head" in finding.message


def test_so_are_those_of_another_call():
    run = scan(lambda: many_heads(DrawnByRand))
    (finding,) = found(run, "PC101")
    assert finding.value == sum(one.nonfinite for one in run.record.parameters) > 0


def test_decays_drawn_in_single_precision_away_from_zero_are_all_finite():
    run = scan(lambda: many_heads(DrawnInSingle))
    assert not any(one.nonfinite for one in run.record.parameters)
    assert not errors(run)


def test_a_truncated_normal_that_half_precision_clamps_is_found():
    """pytorch/torchtitan issue 2269: .2 % of the values lie at the bound -2, a hundred standard deviations away."""
    run = scan(lambda: in_bf16(truncated_in_place))
    (outliers,) = found(run, "PC105")
    assert 22 <= outliers.value <= 100
    assert outliers.expected < 5
    row = parameter(run, "layers.2.mlp.up.weight")
    assert row.absmax == 2.0
    assert row.mean == pytest.approx(-2 / 512, rel=0.3)  # one in 512 at -2
    weights = [one.name.split(" = ")[0] for one in run.record.parameters if one.role in ("linear", "embedding")]
    assert f"{len(weights)} parameters" in outliers.message


def test_the_same_draw_in_single_precision_is_silent():
    run = scan(lambda: in_bf16(truncated_in_single))
    assert not found(run, "PC105")
    assert not errors(run)
    assert parameter(run, "layers.2.mlp.up.weight").absmax < 6.5 * STD
