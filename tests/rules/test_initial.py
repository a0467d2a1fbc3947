"""PC103 to PC105, on numbers by hand."""

import math

import pytest
from synthetic import additive, parameter, run_of

from propcheck.rules import judge

WEIGHT = {
    "role": "linear",
    "sublayer": "mlp",
    "shape": (64, 32),
    "numel": 2048,
    "init_calls": "normal_(0, 0.02)",
    "absmax": 0.08,
}


def weight(at, name="mlp.up.weight", **changes):
    return parameter(f"blocks.{at}.{name}", **{**WEIGHT, "block": at, **changes})


def judged(*parameters, rule):
    return judge(run_of(additive(2), parameters), select=[rule])


# PC103


def test_a_weight_filled_with_a_constant_has_only_copies():
    (finding,) = judged(weight(1, duplicate_rows=63, std=0.0, init_calls="fill_(0.02)"), rule="PC103")
    assert finding.severity == "warning"
    assert finding.site.parameter == "blocks.1.mlp.up.weight"
    assert "all rows are equal" in finding.message


def test_rows_that_were_copied_are_counted():
    (finding,) = judged(weight(0, duplicate_rows=0), weight(1, duplicate_rows=32), rule="PC103")
    assert finding.value == 32
    assert "32 of 64 rows repeat an earlier one" in finding.message


def test_copies_in_many_blocks_are_one_finding():
    (finding,) = judged(*(weight(n, duplicate_rows=32) for n in range(6)), rule="PC103")
    assert "The 6 parameters blocks.*.mlp.up.weight (blocks 0 to 5) have equal rows" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"duplicate_rows": 0},
        {"duplicate_rows": 63, "zeros": 2048, "std": 0.0},  # zero-initialised
        {"duplicate_rows": 10, "zeros": 11 * 32},  # eleven zero rows
        {"duplicate_rows": 63, "requires_grad": False},  # fixed
        {"duplicate_rows": 63, "role": "embedding"},  # rows have inputs of their own
        {"duplicate_rows": 63, "role": "convolution", "shape": (64, 1, 32)},  # depthwise
        {"duplicate_rows": 63, "shape": (64, 8, 4)},  # experts copied from one
        {"duplicate_rows": 63, "block": None},  # a head
        {"duplicate_rows": 20, "shape": (512, 4)},  # chance, in bf16
        {"duplicate_rows": None, "shape": (2048,)},
        {"duplicate_rows": 63, "dtype": "uint8"},  # packed
    ],
)
def test_rows_that_may_be_equal_are_silent(changes):
    assert not judged(weight(1, **changes), rule="PC103")


def test_a_table_of_states_that_all_channels_share_is_silent():
    # [channels, states], every row 1 ... 16: each row decays another channel.
    shared = weight(1, "mixer.A_log", duplicate_rows=63, init_calls="arange(1, 17), repeat(64, 1), log()")
    assert not judged(shared, rule="PC103")


# PC104


def stds(values, calls=None, **changes):
    calls = calls or ["normal_(0, 0.02)"] * len(values)
    return [weight(n, std=std, init_calls=call, **changes) for n, (std, call) in enumerate(zip(values, calls, strict=True))]


def test_one_block_that_the_init_missed_is_found():
    calls = ["normal_(0, 0.02)"] * 5 + ["uniform_(-0.176777, 0.176777)"] + ["normal_(0, 0.02)"] * 6
    (finding,) = judged(*stds([0.02] * 5 + [0.102] + [0.02] * 6, calls), rule="PC104")
    assert finding.site.block == 5
    assert finding.value == pytest.approx(0.102)
    assert finding.expected == pytest.approx(0.02)
    assert "uniform_(-0.176777, 0.176777)" in finding.message
    assert "x5.1 off" in finding.message


def test_so_is_one_that_is_too_small_and_one_expert_of_many():
    assert judged(*stds([0.02] * 5 + [0.0041] + [0.02] * 6), rule="PC104")
    experts = [weight(n // 8, f"experts.{n % 8}.up.weight", std=0.06 if n == 13 else 0.02) for n in range(32)]
    (finding,) = judged(*experts, rule="PC104")
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
    assert not judged(*stds(values), rule="PC104")


def test_a_scheme_with_a_call_of_its_own_for_each_block_is_silent():
    values = [0.02] * 5 + [0.04] + [0.02] * 6
    calls = [f"normal_(0, {std + n * 1e-4})" for n, std in enumerate(values)]
    assert not judged(*stds(values, calls), rule="PC104")


def test_chance_is_no_fault():
    # 18 numbers: their standard deviation is off by a sixth of itself; not judged at all below 1000.
    assert not judged(*stds([0.02] * 5 + [0.032] + [0.02] * 6, shape=(6, 3), numel=18), rule="PC104")
    # 1058: 1.5 x e^(6 / 46) = 1.71 is the limit.
    assert not judged(*stds([0.02] * 5 + [0.0338] + [0.02] * 6, shape=(46, 23), numel=1058), rule="PC104")
    assert judged(*stds([0.02] * 5 + [0.0346] + [0.02] * 6, shape=(46, 23), numel=1058), rule="PC104")


def test_other_names_shapes_and_roles_are_no_siblings():
    others = [*stds([0.02] * 6), *stds([0.02] * 6, shape=(32, 64))]
    assert not judged(*others, weight(3, "mlp.down.weight", std=0.1), rule="PC104")


# PC105

LARGE = {"shape": (1000, 1000), "numel": 10**6}  # sqrt(2 ln 1e6) = 5.26


@pytest.mark.parametrize(
    "calls",
    [
        "normal_(0, 0.02)",
        "trunc_normal_(0, 0.02, -2, 2)",
        "uniform_(-1, 1), erfinv_(), mul_(0.0282843), add_(0), clamp_(-2, 2)",
        "normal_(0, 1), mul_(0.02), to(bfloat16), fill_(0)",
        "normal_(0, 0.02) x 8",
    ],
)
def test_a_broken_normal_draw_is_found(calls):
    # 0.2 % at -2: the standard deviation becomes sqrt(0.0004 + 0.002 x 4) = 0.092.
    (finding,) = judged(weight(1, init_calls=calls, std=0.0916, mean=-0.004, absmax=2.0, **LARGE), rule="PC105")
    assert finding.value == pytest.approx(21.8, rel=0.01)
    assert finding.expected == pytest.approx(5.26, rel=0.001)
    assert calls in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"absmax": 0.1},  # 5 standard deviations
        {"absmax": 0.2},  # 10, below twice 5.26
        {"absmax": 2.0, "init_calls": "constant"},
        {"absmax": 2.0, "init_calls": "normal_(0, 0.02), normal_(0, 1)"},  # two parts
        {"absmax": 2.0, "init_calls": "normal_(0, 0.02), mul_()"},  # times a tensor
        {"absmax": 2.0, "init_calls": "normal_(0, 0.02), fill_(2)"},
        {"absmax": 2.0, "init_calls": "log_normal_(0, 1)"},
        {"absmax": 2.0, "init_calls": "uniform_(0.001, 0.1), log_()"},
        {"absmax": 2.0, "init_calls": "(normal_(0, 1), exp_()) x 3"},
        {"absmax": 2.0, "init_calls": "normal_(0, 1), ... 4 more ..., mul_(2)"},
        {"absmax": 1.0, "std": 0.1, "init_calls": "zero_(), fill_diagonal_(1)"},  # one-hot rows
        {"absmax": 2.0, "role": "bias"},
        {"absmax": 2.0, "kind": "buffer"},
        {"absmax": 2.0, "shape": (9, 100), "numel": 900},
        {"absmax": 1.1, "mean": 1.0},  # around 1
        {"absmax": 0.1, "std": 0.002, "zeros": 990_000},  # 99 % masked: 0.02 among the rest
        {"absmax": 0.0, "std": 0.0, "zeros": 10**6},
    ],
)
def test_a_sound_draw_and_what_may_be_meant_are_silent(changes):
    assert not judged(weight(1, **{**LARGE, **changes}), rule="PC105")
