"""PC101: NaN and infinity in parameters and buffers."""

import dataclasses
import math

import pytest
from synthetic import additive, judging, parameter, run_of

from propcheck.rules import judge

DECAY = {"role": "scale", "sublayer": "linear_attention", "shape": (48,), "numel": 48, "init_calls": "uniform_(0, 16), log_()"}
LOST = {"nonfinite": 2, "absmax": math.inf, "mean": -math.inf, "std": math.nan}


judged = judging("PC101", blocks=0)


def test_infinite_decays_are_named_with_count_and_calls():
    (finding,) = judged(parameter("blocks.3.mixer.A_log", block=3, **DECAY, **LOST))
    assert finding.severity == "error"
    assert finding.site.parameter == "blocks.3.mixer.A_log"
    assert finding.site.block == 3
    assert finding.value == 2
    assert "2 -inf elements of 48" in finding.message
    assert "uniform_(0, 16), log_()" in finding.message
    assert "one head or channel" in finding.message


def test_finite_decays_are_silent():
    assert not judged(parameter("blocks.3.mixer.A_log", block=3, **DECAY))


def test_one_name_in_many_blocks_is_one_finding():
    bad = [parameter(f"blocks.{n}.mixer.A_log", block=n, **DECAY, **LOST) for n in (5, 11, 40)]
    good = [parameter(f"blocks.{n}.mixer.A_log", block=n, **DECAY) for n in (0, 1)]
    (finding,) = judged(*good, *bad)
    assert finding.value == 6
    assert "The 3 parameters blocks.*.mixer.A_log (blocks 5 to 40) contain 6 -inf elements of 144" in finding.message


def test_a_nan_is_a_fault_wherever_it_is():
    nan = {"nonfinite": 1, "absmax": math.nan, "mean": math.nan, "std": math.nan, "shape": (8, 8), "numel": 64, "zeros": 63}
    for changes in ({}, {"kind": "buffer", "requires_grad": False}, {"requires_grad": False}):
        (finding,) = judged(parameter("table", **nan, **changes))
        assert "NaN or infinite" in finding.message


UNTRAINED = {"kind": "buffer", "requires_grad": False, "grad_state": None, "role": None}
MASK = {"absmax": math.inf, "mean": -math.inf, "std": math.nan}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (8, 8), "numel": 64, "nonfinite": 28, "zeros": 36, "init_calls": "tril_(0), log()", **MASK},
        {"shape": (8,), "numel": 8, "nonfinite": 3, "zeros": 5, "init_calls": "constant", **MASK},
        {"shape": (8, 8), "numel": 64, "nonfinite": 28, "zeros": 8, "init_calls": "constant, mul(), where()", **MASK},  # ALiBi
        {"shape": (8,), "numel": 8, "nonfinite": 3, "zeros": 0, "init_calls": "arange(8), masked_fill_(-inf)", **MASK},
        {"shape": (), "numel": 1, "nonfinite": 1, "absmax": math.inf, "mean": math.inf, "init_calls": "constant"},  # a bound
    ],
)
def test_infinities_that_are_meant_are_silent_unless_they_are_trained(changes):
    assert not judged(parameter("mask", **{**UNTRAINED, **changes}))
    assert not judged(parameter("mask", **{**UNTRAINED, **changes, "kind": "parameter"}))
    assert judged(parameter("mask", **changes))


def test_infinities_that_were_computed_are_a_fault_in_a_buffer_too():
    overflow = {
        "shape": (64,),
        "numel": 64,
        "nonfinite": 4,
        "absmax": math.inf,
        "mean": math.inf,
        "init_calls": "arange(64), exp()",
    }
    (finding,) = judged(parameter("inverse_frequency", **{**UNTRAINED, **overflow}))
    assert "The buffer inverse_frequency contains 4 infinite elements of 64" in finding.message


def test_a_vector_of_nothing_but_infinities_is_no_mask():
    everything = {"shape": (8,), "numel": 8, "nonfinite": 8, "zeros": 0, "init_calls": "zeros(), log()", **MASK}
    assert judged(parameter("decays", **{**UNTRAINED, **everything}))


def test_what_was_never_written_is_blamed_once():
    garbage = parameter("scales", init_calls=None, nonfinite=12, absmax=math.nan, mean=math.nan, std=math.nan)
    assert [f.rule for f in judge(run_of(additive(2), [garbage]))] == ["PC102"]
    spoilt = [dataclasses.replace(r, nonfinite=1, sum_rms=math.nan) for r in additive(2)]
    (finding,) = judge(run_of(spoilt, [garbage]))
    assert (finding.rule, finding.also) == ("PC102", ("PC209 at 4 sites",))
