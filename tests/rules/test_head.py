"""PC401 and PC402, on numbers by hand."""

import dataclasses
import math

import pytest
from synthetic import additive, factors, parameter, run_of

from propcheck.records import LossInfo, NormRecord
from propcheck.rules import judge

HEAD = {"role": "linear", "shape": (500, 512), "numel": 256000, "init_calls": "normal_(0, 1)", "std": 1.0, "absmax": 4.6}


def judged(loss, *parameters, rule, sites=None, norms=()):
    run = dataclasses.replace(run_of(sites or additive(4), parameters), loss=loss, norms=tuple(norms))
    return judge(run, select=rule.split())


# PC401


def test_a_loss_far_above_a_uniform_guess_is_found_with_what_its_logits_explain():
    # At most 22.6 sqrt(2 ln 500) = 79.7; one draw of 256 x 500 such logits gave 66.2.
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    (finding,) = judged(loss, rule="PC401")
    assert (finding.severity, finding.value) == ("warning", 66.2)
    assert finding.expected == pytest.approx(6.21, abs=0.01)
    assert "x10.7 that of a uniform guess" in finding.message
    assert "at most s sqrt(2 ln V) = 79.7" in finding.message


def test_smaller_logits_explain_half_their_variance():
    # One draw of 2000 logits of 3.39 gave 13.15; ln 2000 + 3.39^2 / 2 = 13.35.
    (finding,) = judged(LossInfo(value=13.15, uniform=math.log(2000), logit_std=3.39), rule="PC401")
    assert "ln V + s^2 / 2 = 13.3" in finding.message
    (finding,) = judged(LossInfo(value=13.15, uniform=math.log(2000)), rule="PC401")
    assert finding.message.endswith("ln(vocabulary) = 7.6.")


def test_a_loss_that_the_spread_does_not_explain_is_laid_to_single_logits():
    # The head of a small T5 that is tied and not scaled: each word's own logit is about 270.
    loss = LossInfo(value=266.0, uniform=math.log(500), logit_std=25.0, logit_absmax=300.0)
    (finding,) = judged(loss, rule="PC401")
    assert "at most s sqrt(2 ln V) = 88.1; the rest is made by single logits of up to 300" in finding.message
    (finding,) = judged(dataclasses.replace(loss, logit_absmax=None), rule="PC401")
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
    assert not judged(loss, rule="PC401")


DEAD = LossInfo(value=math.log(500), uniform=math.log(500), logit_std=0.0, logit_absmax=0.0)
ZERO = {**HEAD, "std": 0.0, "absmax": 0.0, "zeros": 256000}


def test_a_head_that_starts_at_zero_and_has_a_gradient_is_a_note():
    (finding,) = judged(DEAD, parameter("head.weight", **ZERO), parameter("a", grad_state="zero"), rule="PC401")
    assert finding.severity == "note"
    assert finding.site.parameter == "head.weight"
    assert "head.weight is zero at the start, and has a gradient" in finding.message


def test_dead_logits_that_nothing_has_a_gradient_for_are_an_error():
    zero = parameter("head.weight", **ZERO, grad_state="zero")
    (finding,) = judged(DEAD, zero, parameter("a", grad_state="none"), rule="PC401")
    assert finding.severity == "error"
    assert "no parameter gets a gradient" in finding.message


@pytest.mark.parametrize("parameters", [[], [parameter("blocks.0.a", block=0)], [parameter("head.weight", **HEAD)]])
def test_dead_logits_of_unknown_cause_are_a_warning(parameters):
    (finding,) = judged(DEAD, *parameters, rule="PC401")
    assert finding.severity == "warning"


def test_a_loss_is_folded_under_the_explosion_that_made_it():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    found = judged(loss, rule="PC201 PC401 PC402", sites=factors(64, forward=1.1))
    assert [f.rule for f in found] == ["PC201"]
    assert found[0].also[-2:] == ("PC401", "PC402")


# PC402


def test_logits_beyond_the_freezing_point_are_found_with_their_head():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    (finding,) = judged(loss, parameter("head.weight", **HEAD), parameter("b", shape=(500, 512), block=1), rule="PC402")
    assert (finding.severity, finding.value) == ("warning", 22.6)
    assert finding.expected == pytest.approx(3.53, abs=0.01)
    assert finding.site.parameter == "head.weight"
    assert "x6.41 the 3.53" in finding.message
    # sqrt(512) = 22.6, 1 / sqrt(512) = 0.0442.
    assert (
        "has std 1, normal_(0, 1); on an input of RMS 1 that makes logits of 22.6, and 1 / sqrt(512) = 0.0442"
        in finding.message
    )


def test_a_head_is_named_only_where_it_is_known():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    twins = [parameter(name, **HEAD) for name in ("a", "b")]
    for parameters in ([], twins, [parameter("a", **{**HEAD, "shape": (400, 512)})]):
        (finding,) = judged(loss, *parameters, rule="PC402")
        assert finding.site.parameter is None
        assert "The head" not in finding.message


@pytest.mark.parametrize(
    "loss",
    [
        LossInfo(value=13.35, uniform=12.42, logit_std=1.43),  # Qwen3.8-27B
        LossInfo(value=9.0, uniform=6.9, logit_std=3.7),  # sqrt(2 x 6.9) = 3.71
        LossInfo(value=9.0, uniform=6.9, logit_std=None),
        LossInfo(value=9.0, uniform=None, logit_std=50.0),
        LossInfo(value=9.0, uniform=6.9, logit_std=math.nan),
    ],
)
def test_logits_that_are_spread_are_silent(loss):
    assert not judged(loss, rule="PC402")


HEALTHY = LossInfo(value=7.0, uniform=6.9)


def attending(*, absmax, entropy, at=(2, 4)):
    seen = {"attention_logit_rms": absmax / 4, "attention_logit_absmax": absmax, "attention_entropy": entropy}
    return [dataclasses.replace(r, **(seen if r.site in at else {})) for r in additive(4)]


def test_attention_logits_that_precede_spikes_are_one_finding_a_kind():
    # Measured for normal logits of standard deviation 500 over 256 keys: an entropy of .0017 ln 256.
    (finding,) = judged(HEALTHY, rule="PC402", sites=attending(absmax=2000.0, entropy=0.0017))
    assert (finding.severity, finding.value) == ("warning", 2000.0)
    assert finding.site.site == 2
    assert "logits of up to 2000 (RMS 500)" in finding.message
    assert "2 sites of its kind are above 1000." in finding.message
    assert "its weights fall on few keys: their entropy is 0.0017 of that of uniform ones" in finding.message
    # Neither is so of all queries: with q and k times ten and no scale, the gradient of both is large.
    assert "single key" not in finding.message
    assert "gradient" not in finding.message


@pytest.mark.parametrize(
    "seen",
    [
        {"absmax": 900.0, "entropy": 0.01},
        {"absmax": 1400.0, "entropy": 0.6},  # a bias by distance over 2000 tokens
        {"absmax": 1150.0, "entropy": 0.31},  # ALiBi's two steepest slopes over 2300 tokens, measured
        {"absmax": 33000.0, "entropy": 0.1001},  # slope 1 over 32000: 1.0407 / ln 32000 = .1003
        {"absmax": 2000.0, "entropy": None},
        {"absmax": math.inf, "entropy": math.nan},  # PC209 reports it
    ],
)
def test_attention_logits_that_are_small_or_a_bias_are_silent(seen):
    assert not judged(HEALTHY, rule="PC402", sites=attending(**seen))


def test_attention_logits_are_folded_under_the_gain_that_made_them():
    def gained(at):
        return NormRecord(
            seed=0, norm=at, site=2 * at, block=at, place="read", module=f"blocks.{at}.norm", parameter=None,
            kind="mean_square", dtype="float32", width=5120, gain=40.0,
        )  # fmt: skip

    sites = attending(absmax=2000.0, entropy=0.01)
    found = judged(HEALTHY, rule="PC106 PC402", sites=sites, norms=[gained(n) for n in range(4)])
    assert [f.rule for f in found] == ["PC106"]
    assert found[0].also == ("PC402 at 2 sites",)
    # Only one of the two sites has the gain.
    found = judged(HEALTHY, rule="PC106 PC402", sites=sites, norms=[gained(2)])
    assert [f.rule for f in found] == ["PC106", "PC402"]
