"""PC301 on gradients whose law is known."""

import dataclasses
import math

import pytest
from synthetic import additive, broken_rules, factors, only_finding, qwen, run_of, with_gradient

from propcheck.rules import judge


def power_law(blocks, exponent):
    """Pre-norm with a gradient of (depth + 1)^-exponent, from a forward pass with updates of one size."""
    return [
        with_gradient(r, (r.site / 2 + 1) ** -exponent, (r.site / 2 + 1.5) ** -exponent)
        for r in additive(blocks, embedding=1.0, updates=(0.01, 1.0))
    ]


@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("blocks", [4, 12, 64])
def test_power_laws_toward_the_input_are_healthy(blocks, exponent):
    assert broken_rules(run_of(power_law(blocks, exponent))) == []


def test_the_stock_qwen_gradient_is_explained_by_its_forward_pass():
    records = qwen()
    assert records[0].grad_stream_norm / records[126].grad_stream_norm > 20000
    assert broken_rules(run_of(records), select=["PC301", "PC302"]) == []


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none", None])
def test_ten_percent_a_block_explodes(placement):
    finding = only_finding(run_of(factors(64, backward=1.1, placement=placement)), "PC301")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(1.1)
    assert "x446 over 64 blocks" in finding.message
    assert "It goes as 1.1^block, an exponential, over blocks 17 to 63." in finding.message


@pytest.mark.parametrize("blocks", [12, 17])
def test_a_hundredfold_a_layer_explodes(blocks):
    finding = only_finding(run_of(factors(blocks, backward=100.0)), "PC301")
    assert finding.value == pytest.approx(100.0)
    assert f"x1e{2 * blocks} over {blocks} blocks" in finding.message


def test_what_overflowed_does_not_hide_the_trend_before_it():
    records = [with_gradient(r, math.inf, math.inf) if r.site < 10 else r for r in factors(17, backward=100.0)]
    assert broken_rules(run_of(records)) == ["PC301", "PC305"]


def test_a_forward_explosion_does_not_excuse_the_gradients():
    records = [dataclasses.replace(r, update_ratio=3.0) for r in factors(64, forward=1.2, backward=1.2)]
    assert broken_rules(run_of(records), select=["PC301"]) == ["PC301"]
    (finding,) = judge(run_of(records))
    assert (finding.rule, finding.also) == ("PC201", ("PC301 at 86 sites",))  # 48 blocks, of which a tenth is left out


def test_a_forward_explosion_that_leads_gradients_which_are_an_error_is_one():
    # 1.05^64 = 23, a warning by itself; 1.2^64 = 1.2e5.
    (alone,) = judge(run_of(factors(64, forward=1.05)))
    (leading,) = judge(run_of(factors(64, forward=1.05, backward=1.2)))
    assert (alone.rule, alone.severity) == ("PC201", "warning")
    assert (leading.rule, leading.severity, leading.also) == ("PC201", "error", ("PC301 at 86 sites",))


def test_swiglu_under_post_norm_explodes_by_its_own_law():
    # (1+b)/(1+f) with f = 11.7 and b = 2.04 f is 1.96 an MLP addition: x1.4 a block backward.
    step = math.sqrt((1 + 2.04 * 11.7) / (1 + 11.7))
    finding = only_finding(run_of(factors(64, backward=step, placement="post"), placement="post"), "PC301")
    assert finding.value == pytest.approx(1.4, rel=0.01)
    assert "A norm after each addition" in finding.message
