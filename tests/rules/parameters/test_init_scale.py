"""PC104 for siblings: a weight against those of the same name in other blocks."""

import math

import pytest
from synthetic import judging, weight

judged = judging("PC104", blocks=2)


def stds(values, calls=None, **changes):
    calls = calls or ["normal_(0, 0.02)"] * len(values)
    return [weight(n, std=std, init_calls=call, **changes) for n, (std, call) in enumerate(zip(values, calls, strict=True))]


def test_one_block_that_the_init_missed_is_found():
    calls = ["normal_(0, 0.02)"] * 5 + ["uniform_(-0.176777, 0.176777)"] + ["normal_(0, 0.02)"] * 6
    (finding,) = judged(*stds([0.02] * 5 + [0.102] + [0.02] * 6, calls))
    assert finding.site.block == 5
    assert finding.value == pytest.approx(0.102)
    assert finding.expected == pytest.approx(0.02)
    assert "uniform_(-0.176777, 0.176777)" in finding.message
    assert "5.1 times the 0.02 (normal_(0, 0.02)) of the 11 parameters of the same name" in finding.message


def test_so_is_one_that_is_too_small_and_one_expert_of_many():
    assert judged(*stds([0.02] * 5 + [0.0041] + [0.02] * 6))
    experts = [weight(n // 8, f"experts.{n % 8}.up.weight", std=0.06 if n == 13 else 0.02) for n in range(32)]
    (finding,) = judged(*experts)
    assert finding.site.parameter == "blocks.1.experts.5.up.weight"


@pytest.mark.parametrize(
    "values",
    [
        [0.02] * 12,
        [0.02] * 5 + [0.028] + [0.02] * 6,  # below the threshold
        [0.02 / math.sqrt(n + 1) for n in range(12)],
        [0.02 / (n + 1) for n in range(12)],
        [0.02 * 0.8**n for n in range(24)],
        [0.04 if n % 4 == 3 else 0.02 for n in range(16)],  # every fourth
        [0.04 if n % 4 == 3 else 0.02 for n in range(8)],
        [0.02] * 6 + [0.05] * 6,  # two regimes
        [0.08] + [0.02] * 11,  # the first and the last may be special
        [0.02] * 11 + [0.08],
        [0.02, 0.08, 0.02],  # too few
        [0.02] * 5 + [0.0] + [0.02] * 6,  # a block that starts as the identity
    ],
)
def test_a_scale_that_a_scheme_can_explain_is_silent(values):
    assert not judged(*stds(values))


def test_a_scheme_with_a_call_of_its_own_for_each_block_is_silent():
    values = [0.02] * 5 + [0.04] + [0.02] * 6
    calls = [f"normal_(0, {std + n * 1e-4})" for n, std in enumerate(values)]
    assert not judged(*stds(values, calls))


def test_chance_is_no_fault():
    # 18 numbers: their standard deviation is off by a sixth of itself; not judged at all below 1000.
    assert not judged(*stds([0.02] * 5 + [0.032] + [0.02] * 6, shape=(6, 3), numel=18))
    # 1058: 1.5 x e^(6 / 46) = 1.71 is the limit.
    assert not judged(*stds([0.02] * 5 + [0.0338] + [0.02] * 6, shape=(46, 23), numel=1058))
    assert judged(*stds([0.02] * 5 + [0.0346] + [0.02] * 6, shape=(46, 23), numel=1058))


def test_other_names_shapes_and_roles_are_no_siblings():
    others = [*stds([0.02] * 6), *stds([0.02] * 6, shape=(32, 64))]
    assert not judged(*others, weight(3, "mlp.down.weight", std=0.1))
