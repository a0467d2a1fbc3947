"""PC104 for the biases of step sizes: softplus of them against 0.001 to 0.1."""

import math

import pytest
from synthetic import additive, parameter, run_of

from propcheck.rules import judge


def biases(mean, sublayer="ssm", **changes):
    fields = {"role": "step_bias", "sublayer": sublayer, "shape": (24,), "numel": 24, "mean": mean, "std": 0.0}
    return [parameter(f"blocks.{n}.mixer.dt_bias", block=n, **{**fields, **changes}) for n in range(3)]


def judged(parameters):
    return judge(run_of(additive(3), parameters), select=["PC104"])


def test_biases_left_at_one_step_by_1_31():
    # fla-org/flash-linear-attention pull request 739.
    (finding,) = judged(biases(1.0, init_calls="fill_(1.0)"))
    assert finding.severity == "warning"
    assert finding.site.parameter == "blocks.0.mixer.dt_bias"
    assert finding.value == pytest.approx(1.3133, rel=1e-4)
    assert "The 3 parameters blocks.*.mixer.dt_bias (blocks 0 to 2) start at a mean of 1 (fill_(1.0))" in finding.message
    assert "softplus of that mean, 1.31; Mamba draws step sizes from 0.001 to 0.1" in finding.message
    assert "keeps 26.9 % of the state" in finding.message  # e^-1.3133


def test_beside_a_delta_rule_it_is_a_note():
    assert [finding.severity for finding in judged(biases(1.0, "linear_attention"))] == ["note"]


@pytest.mark.parametrize("step", [0.0002, 0.7, 30.0])
def test_so_are_other_steps_far_outside(step):
    (finding,) = judged(biases(math.log(math.expm1(step))))
    assert finding.value == pytest.approx(step, rel=1e-6)


@pytest.mark.parametrize("step", [0.001, 0.01, 0.1, 0.14, 0.0007])
def test_steps_in_the_range_are_silent(step):
    assert not judged(biases(math.log(math.expm1(step)), std=1.3))


@pytest.mark.parametrize("changes", [{"role": "bias"}, {"init_calls": None}, {"nonfinite": 1}, {"kind": "buffer"}])
def test_other_biases_are_silent(changes):
    assert not judged(biases(1.0, **changes))


def test_a_bias_that_nothing_can_exponentiate_does_no_harm():
    (finding,) = judged(biases(-2000.0))
    assert finding.value == 0.0
    assert judged(biases(2000.0))[0].value == 2000.0
