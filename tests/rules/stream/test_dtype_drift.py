"""PC211 on hand-made records."""

import dataclasses

import pytest
from synthetic import additive, parameter, run_of

from propcheck.records import Angle
from propcheck.rules import judge

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
