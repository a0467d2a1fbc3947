"""PC401: the first loss and logits that are all equal."""

import dataclasses
import math

import pytest
from synthetic import additive, factors, parameter, run_of

from propcheck.records import LossInfo
from propcheck.rules import judge

HEAD = {"role": "linear", "shape": (500, 512), "numel": 256000, "init_calls": "normal_(0, 1)", "std": 1.0, "absmax": 4.6}


def judged(loss, *parameters, rule="PC401", sites=None, norms=()):
    run = dataclasses.replace(run_of(sites or additive(4), parameters), loss=loss, norms=tuple(norms))
    return judge(run, select=rule.split())


def test_a_loss_far_above_a_uniform_guess_is_found_with_what_its_logits_explain():
    # At most 22.6 sqrt(2 ln 500) = 79.7; one draw of 256 x 500 such logits gave 66.2.
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    (finding,) = judged(loss)
    assert (finding.severity, finding.value) == ("warning", 66.2)
    assert finding.expected == pytest.approx(6.21, abs=0.01)
    assert "10.7 times that of a uniform guess" in finding.message
    assert "at most s sqrt(2 ln V) = 79.7" in finding.message


def test_smaller_logits_explain_half_their_variance():
    # One draw of 2000 logits of 3.39 gave 13.15; ln 2000 + 3.39^2 / 2 = 13.35.
    (finding,) = judged(LossInfo(value=13.15, uniform=math.log(2000), logit_std=3.39))
    assert "ln V + s^2 / 2 = 13.3" in finding.message
    (finding,) = judged(LossInfo(value=13.15, uniform=math.log(2000)))
    assert "ln(vocabulary) = 7.6." in finding.message
    assert finding.message.endswith("shrinking its logits.")


def test_a_loss_that_the_spread_does_not_explain_is_laid_to_single_logits():
    # The head of a small T5 that is tied and not scaled: each word's own logit is about 270.
    loss = LossInfo(value=266.0, uniform=math.log(500), logit_std=25.0, logit_absmax=300.0)
    (finding,) = judged(loss)
    assert "at most s sqrt(2 ln V) = 88.1; the rest comes from single logits of up to 300" in finding.message
    (finding,) = judged(dataclasses.replace(loss, logit_absmax=None))
    assert finding.message.endswith("= 88.1.")


@pytest.mark.parametrize(
    "loss",
    [
        LossInfo(value=13.35, uniform=12.42, logit_std=1.43),  # Qwen3.8-27B
        LossInfo(value=9.0, uniform=6.9),
        LossInfo(value=0.5, uniform=6.9),  # other losses, trained weights
        LossInfo(value=math.nan, uniform=6.9),  # PC209 and PC305 report it
        LossInfo(value=math.inf, uniform=6.9),
        LossInfo(value=None, uniform=6.9),
        LossInfo(value=100.0, uniform=None),
        LossInfo(value=0.0, uniform=0.0, logit_std=0.0),
    ],
)
def test_a_loss_near_a_uniform_guess_or_without_one_is_silent(loss):
    assert not judged(loss)


DEAD = LossInfo(value=math.log(500), uniform=math.log(500), logit_std=0.0, logit_absmax=0.0)
ZERO = {**HEAD, "std": 0.0, "absmax": 0.0, "zeros": 256000}


def test_a_head_that_starts_at_zero_and_has_a_gradient_is_a_note():
    (finding,) = judged(DEAD, parameter("head.weight", **ZERO), parameter("a", grad_state="zero"))
    assert finding.severity == "note"
    assert finding.site.parameter == "head.weight"
    assert "head.weight starts at zero, but has a gradient" in finding.message


def test_dead_logits_that_nothing_has_a_gradient_for_are_an_error():
    zero = parameter("head.weight", **ZERO, grad_state="zero")
    (finding,) = judged(DEAD, zero, parameter("a", grad_state="none"))
    assert finding.severity == "error"
    assert "No parameter gets a gradient" in finding.message


@pytest.mark.parametrize("parameters", [[], [parameter("blocks.0.a", block=0)], [parameter("head.weight", **HEAD)]])
def test_dead_logits_of_unknown_cause_are_a_warning(parameters):
    (finding,) = judged(DEAD, *parameters)
    assert finding.severity == "warning"


def test_a_loss_is_folded_under_the_explosion_that_made_it():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    found = judged(loss, rule="PC201 PC401 PC402", sites=factors(64, forward=1.1))
    assert [f.rule for f in found] == ["PC201"]
    assert found[0].also[-2:] == ("PC401", "PC402")
