"""PC207 by the measured table of bf16 additions."""

import dataclasses

import pytest
from synthetic import additive, qwen, run_of

from propcheck.rules import judge


@pytest.mark.parametrize(
    ("swallowed", "severities"),
    [
        (0.018, []),
        (0.09, []),
        (0.17, []),
        (0.26, ["note"]),
        (0.39, ["note"]),
        (0.78, ["warning"]),
        (None, []),
        (float("nan"), []),
    ],
)
def test_the_share_of_lost_elements_decides(swallowed, severities):
    records = additive(4)
    records[4] = dataclasses.replace(records[4], swallowed=swallowed)
    findings = judge(run_of(records), select=["PC207"])
    assert [finding.severity for finding in findings] == severities
    assert all(finding.site.site == 4 and finding.value == swallowed for finding in findings)


@pytest.mark.parametrize(
    ("stream", "update", "told"),
    [
        ("bfloat16", "bfloat16", "Rounding of the bfloat16 stream discards"),
        # x + F gives fp32, x += F keeps bf16: what was done is not recorded.
        ("bfloat16", "float32", "Rounding in the sum of a bfloat16 stream and a float32 update discards"),
        (None, "bfloat16", "Rounding discards"),
    ],
)
def test_a_dtype_that_rounds_is_named_only_where_both_operands_have_it(stream, update, told):
    records = additive(4)
    records[4] = dataclasses.replace(records[4], swallowed=0.5, stream_dtype=stream, update_dtype=update)
    (finding,) = judge(run_of(records), select=["PC207"])
    assert finding.message.startswith(told)


def test_late_deltanet_updates_of_the_stock_qwen_model_are_one_finding():
    (finding,) = judge(run_of(qwen()), select=["PC207"])
    assert finding.site.sublayer == "linear_attention"
    assert finding.site.block == 62
    assert finding.value == pytest.approx(0.25, abs=0.03)  # "about a quarter"
    assert "of 48 linear_attention sites" in finding.message
