"""PC211 and PC212, on records by hand."""

import dataclasses
import math

import pytest
import torch
from synthetic import additive, parameter, run_of

from propcheck.records import Angle, NormRecord
from propcheck.rules import judge
from propcheck.rules.dtypes import LARGEST, SMALLEST_NORMAL

WEIGHTS = [parameter("blocks.0.up.weight", numel=10**6), parameter("blocks.0.scale", dtype="float32", numel=100)]


def chained(blocks=2, **by_site):
    """A stack whose every site continues the one before, with changes by site: ``s3={...}``."""
    records = [dataclasses.replace(r, continues=r.site - 1 if r.site else None) for r in additive(blocks)]
    for name, changes in by_site.items():
        number = int(name[1:])
        records[number] = dataclasses.replace(records[number], **changes)
    return records


def drift(records=(), parameters=WEIGHTS, **changes):
    return judge(run_of(records or chained(), parameters, **changes), select=["PC211"])


def wide(*numbers):
    return {f"s{n}": {"stream_dtype": "float32"} for n in numbers}


def test_the_largest_and_smallest_numbers_are_those_of_torch():
    for name, largest in LARGEST.items():
        info = torch.finfo(getattr(torch, name))
        assert (largest, SMALLEST_NORMAL[name]) == (info.max, info.smallest_normal)


# PC211, the stream


def test_a_stream_that_a_factor_promotes_is_found_where_it_begins():
    records = chained(**wide(1, 2, 3), s0={"stream_dtype": "float32", "promoted": "mul with scale (float32)"})
    (finding,) = drift(records)
    assert (finding.severity, finding.site.site) == ("warning", 0)
    assert (finding.expected, finding.value) == ("bfloat16", "float32")
    assert "changes from bfloat16 to float32 at site 0" in finding.message
    assert "mul with scale (float32)" in finding.message
    assert "Of the 3 sites after it, 3 read it in float32" in finding.message


def test_so_is_one_that_an_update_promotes():
    records = chained(**wide(2, 3), s1={"update_dtype": "float32"})
    (finding,) = drift(records)
    assert finding.site.site == 1
    assert "the update added there is float32" in finding.message
    assert "Of the 2 sites after it, 2 read it" in finding.message


def test_a_stream_that_every_block_casts_back_and_promotes_again_is_one_finding():
    promoted = {"stream_dtype": "float32", "promoted": "mul with scale (float32)"}
    (finding,) = drift(chained(3, s0=promoted, s2=promoted, s4=promoted))
    assert finding.site.site == 0
    assert "It happens again at 2 later sites" in finding.message


def test_the_dtype_before_is_that_of_the_sum_before():
    fp16 = {f"s{n}": {"stream_dtype": "float16", "update_dtype": "float16"} for n in range(2)}
    later = {"s2": {"stream_dtype": "float32", "update_dtype": "float16", "promoted": "add with bias (float32)"}}
    (finding,) = drift(chained(**fp16, **later), [parameter("w", dtype="float16")])
    assert (finding.site.site, finding.expected, finding.value) == (2, "float16", "float32")


@pytest.mark.parametrize(
    ("records", "parameters"),
    [
        (chained(), WEIGHTS),
        (chained(**wide(0, 1, 2, 3)), WEIGHTS),  # fp32 from its beginning, or by a cast
        (chained(**wide(2, 3)), WEIGHTS),  # cast in the middle
        # Autocast: wide parameters, bf16 products; a position embedding makes the first stream fp32.
        (
            chained(**wide(1, 2, 3), s0={"stream_dtype": "float32", "promoted": "add with positions (float32)"}),
            [parameter("w", dtype="float32")],
        ),
        (chained(**wide(1, 2, 3), s0={"update_dtype": "float32"}), [parameter("w", dtype="float32")]),
        (chained(s0={"update_dtype": "float32"}), ()),  # nothing says what was meant
        (chained(s1={"stream_dtype": None, "update_dtype": None}), WEIGHTS),
    ],
)
def test_a_stream_that_is_wide_on_purpose_is_silent(records, parameters):
    assert not drift(records, parameters)


# PC211, tables and angles


def table(name="rotary.cos", **changes):
    return parameter(name, **{"kind": "buffer", "role": None, "shape": (2048, 64), "fp64_error": 2.0, **changes})


def test_a_rotary_table_made_in_half_precision_is_found():
    calls = "arange(2048), to(bfloat16), cos()"
    (finding,) = drift(parameters=[*WEIGHTS, table(init_calls=calls), table("rotary.sin", fp64_error=1.99)])
    assert (finding.severity, finding.site.parameter, finding.value) == ("warning", "rotary.cos", 2.0)
    assert calls in finding.message
    assert "So is 1 more buffer" in finding.message


def test_tables_of_all_blocks_are_one_finding():
    tables = [table(f"blocks.{n}.rotary.cos", block=n) for n in range(4)]
    (finding,) = drift(parameters=tables)
    assert "The 4 buffers blocks.*.rotary.cos (blocks 0 to 3) were computed" in finding.message


@pytest.mark.parametrize(
    "changes",
    [{"fp64_error": 0.0}, {"fp64_error": 0.036}, {"fp64_error": None}, {"dtype": "float32"}, {"kind": "parameter"}],
)
def test_a_table_that_rounding_explains_is_silent(changes):
    assert not drift(parameters=[table(**changes)])


def angle(error, module="blocks.0.attention", **changes):
    return Angle(
        **{"module": module, "block": 0, "parameter": None, "dtype": "bfloat16", "largest": 2047.0, **changes}, error=error
    )


def test_coarse_angles_are_one_finding_at_the_worst():
    (finding,) = drift(angles=(angle(0.3), angle(4.0, "rotary", parameter="rotary.frequencies", block=None), angle(0.01)))
    assert (finding.value, finding.site.module, finding.site.parameter) == (4.0, "rotary", "rotary.frequencies")
    assert "angles up to 2047" in finding.message or "angles up to 2050" in finding.message
    assert "only accurate to 4: rotary.frequencies is bfloat16" in finding.message
    assert "The same holds at 1 more place" in finding.message
    assert not drift(angles=(angle(0.05),))


def test_each_kind_of_drift_is_a_finding_of_its_own():
    records = chained(**wide(2, 3), s1={"update_dtype": "float32"})
    findings = drift(records, [*WEIGHTS, table()], angles=(angle(1.0),))
    assert {finding.metric for finding in findings} == {"stream_dtype", "fp64_error", "angle error"}


# PC212


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
