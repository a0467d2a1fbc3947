"""PC212 on hand-made records."""

import dataclasses
import math

import pytest
from synthetic import additive, run_of

from propcheck.records import NormRecord
from propcheck.rules import judge


def in_dtype(dtype, absmax, at=3):
    records = [dataclasses.replace(r, stream_dtype=dtype, update_dtype=dtype) for r in additive(4)]
    records[at] = dataclasses.replace(records[at], sum_absmax=absmax)
    return records


def ranged(records=(), **changes):
    return judge(run_of(records or additive(2), **changes), select=["PC212"])


def test_a_sum_near_the_largest_fp16_number_is_found():
    (finding,) = ranged(in_dtype("float16", 6000.0))
    assert (finding.severity, finding.site.site, finding.value) == ("warning", 3, 6000.0)
    assert "9.16 % of the largest float16 number, 65500" in finding.message
    assert "x10.9 makes it infinite" in finding.message


def test_however_near_it_is_it_is_no_error():
    assert [finding.severity for finding in ranged(in_dtype("float16", 60000.0))] == ["warning"]


@pytest.mark.parametrize(
    ("dtype", "absmax"),
    [("float16", 4000.0), ("bfloat16", 1e6), ("float32", 1e6), ("float16", math.inf), ("float16", None), (None, 1e6)],
)
def test_a_sum_far_from_it_and_one_that_is_infinite_already_are_silent(dtype, absmax):
    assert not ranged(in_dtype(dtype, absmax))


def test_the_range_is_that_of_the_sum_not_of_the_update():
    records = [dataclasses.replace(r, stream_dtype="float32", update_dtype="float16") for r in in_dtype("float16", 6e4)]
    assert not ranged(records)


def test_a_threshold_can_be_given():
    class Setting:
        threshold, severity = 0.5, None

    assert not judge(run_of(in_dtype("float16", 6000.0)), settings={"PC212": Setting()}, select=["PC212"])


def norm(**changes):
    # pytorch issue 133085: fp16, no upcast, input std 300.
    fields = {
        "seed": 0, "norm": 4, "site": 2, "block": 1, "place": "read", "module": "blocks.1.norm",
        "parameter": "blocks.1.norm.weight", "kind": "mean_square", "dtype": "float16", "width": 256, "eps": 1e-6,
        "input_rms": 300.0, "input_absmax": 1200.0, "output_rms": 0.0, "gain": 1.0, "epsilon_share": 0.0, "zero_share": 1.0,
    }  # fmt: skip
    return NormRecord(**{**fields, **changes})


def test_a_norm_whose_squares_overflow_is_an_error_at_that_norm():
    (finding,) = ranged(norms=(norm(), norm(norm=5, module="blocks.1.other")))
    assert (finding.severity, finding.site.module, finding.site.site) == ("error", "blocks.1.norm", 2)
    assert "everything above 256 has an infinite square" in finding.message
    assert "reaches 1200 (RMS 300), and 100 % of its vectors come out as zero" in finding.message
    assert "The same holds at 1 more norm" in finding.message


def test_a_bias_does_not_hide_it():
    (finding,) = ranged(norms=(norm(output_rms=0.1, zero_share=0.0),))
    assert "its output has RMS 0.1 where its gain alone gives 1" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"output_rms": 1.0, "zero_share": 0.0},
        {"dtype": "float32"},  # upcast
        {"dtype": "bfloat16"},
        {"gain": 0.0},  # a norm that starts as nothing
        {"input_rms": 10.0, "input_absmax": 40.0},  # zero for another reason
        {"input_absmax": None},
        {"kind": "length", "zero_share": 0.0, "output_rms": 0.06},
        {"kind": "variance", "zero_share": 0.0, "output_rms": 0.1},  # a mean far above the spread
        {"eps": 1e6, "zero_share": 0.0, "output_rms": 0.28},  # damped by eps
        {"seed": 1},
    ],
)
def test_a_norm_that_did_not_overflow_is_silent(changes):
    assert not ranged(norms=(norm(**changes),))


def test_the_distance_to_the_mean_may_be_twice_the_largest_element():
    assert ranged(norms=(norm(kind="variance", input_absmax=200.0),))
    assert not ranged(norms=(norm(kind="mean_square", input_absmax=200.0),))


def test_each_seed_is_judged_by_itself():
    records = [*additive(2), *additive(2, seed=1)]
    (finding,) = ranged(records, norms=(norm(output_rms=1.0, zero_share=0.0), norm(seed=1)), seeds=(0, 1))
    assert finding.severity == "error"
    assert "Seen in 1 of 2 seeds" in finding.message


@pytest.mark.parametrize(
    ("dtype", "rms", "found"),
    [
        ("float16", 3e-5, True),
        ("float16", 7e-5, False),
        ("float16", 0.0, False),
        ("bfloat16", 1e-6, False),
        ("float16", None, False),
    ],
)
def test_updates_below_the_smallest_normal_number_are_a_note(dtype, rms, found):
    records = [dataclasses.replace(r, update_dtype=dtype, stream_dtype=dtype) for r in additive(2)]
    records[2] = dataclasses.replace(records[2], update_rms=rms)
    findings = ranged(records)
    assert [(f.severity, f.site.site, f.metric) for f in findings] == ([("note", 2, "update_rms")] if found else [])
    assert all("below the smallest normal float16 number, 6.1e-5" in f.message for f in findings)


def test_the_stream_too():
    records = [dataclasses.replace(r, update_dtype="float16", stream_dtype="float16") for r in additive(2)]
    records[0] = dataclasses.replace(records[0], stream_rms=1e-5)
    (finding,) = ranged(records)
    assert (finding.metric, finding.value) == ("stream_rms", 1e-5)
