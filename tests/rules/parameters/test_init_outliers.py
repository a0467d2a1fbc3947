"""PC105: values far outside the normal distribution they were drawn from."""

import pytest
from synthetic import judging, weight

judged = judging("PC105", blocks=2)


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
    (finding,) = judged(weight(1, init_calls=calls, std=0.0916, mean=-0.004, absmax=2.0, **LARGE))
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
    assert not judged(weight(1, **{**LARGE, **changes}))
