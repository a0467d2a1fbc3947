"""PC402: the scale of output and attention logits."""

import dataclasses
import math

import pytest
from synthetic import additive, parameter, run_of

from propcheck.records import LossInfo, NormRecord
from propcheck.rules import judge

HEAD = {"role": "linear", "shape": (500, 512), "numel": 256000, "init_calls": "normal_(0, 1)", "std": 1.0, "absmax": 4.6}


def judged(loss, *parameters, rule="PC402", sites=None, norms=()):
    run = dataclasses.replace(run_of(sites or additive(4), parameters), loss=loss, norms=tuple(norms))
    return judge(run, select=rule.split())


def test_logits_beyond_the_freezing_point_are_found_with_their_head():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    (finding,) = judged(loss, parameter("head.weight", **HEAD), parameter("b", shape=(500, 512), block=1))
    assert (finding.severity, finding.value) == ("warning", 22.6)
    assert finding.expected == pytest.approx(3.53, abs=0.01)
    assert finding.site.parameter == "head.weight"
    assert "6.41 times the limit of sqrt(2 ln V) = 3.53" in finding.message
    # sqrt(512) = 22.6, 1 / sqrt(512) = 0.0442.
    assert (
        "has std 1 (normal_(0, 1)): an input of RMS 1 gives logits of std 22.6, where std 1 / sqrt(512) = 0.0442 would give 1"
        in finding.message
    )


def test_a_head_is_named_only_where_it_is_known():
    loss = LossInfo(value=66.2, uniform=math.log(500), logit_std=22.6)
    twins = [parameter(name, **HEAD) for name in ("a", "b")]
    for parameters in ([], twins, [parameter("a", **{**HEAD, "shape": (400, 512)})]):
        (finding,) = judged(loss, *parameters)
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
    assert not judged(loss)


HEALTHY = LossInfo(value=7.0, uniform=6.9)


def attending(*, absmax, entropy, at=(2, 4)):
    seen = {"attention_logit_rms": absmax / 4, "attention_logit_absmax": absmax, "attention_entropy": entropy}
    return [dataclasses.replace(r, **(seen if r.site in at else {})) for r in additive(4)]


def test_attention_logits_that_precede_spikes_are_one_finding_a_kind():
    # Measured for normal logits of standard deviation 500 over 256 keys: an entropy of .0017 ln 256.
    (finding,) = judged(HEALTHY, sites=attending(absmax=2000.0, entropy=0.0017))
    assert (finding.severity, finding.value) == ("warning", 2000.0)
    assert finding.site.site == 2
    assert "logits of up to 2000 (RMS 500)" in finding.message
    assert "2 sites of this kind are above 1000." in finding.message
    assert "its weights concentrate on few keys: their entropy is 0.0017 of that of uniform weights" in finding.message
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
    assert not judged(HEALTHY, sites=attending(**seen))


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
