"""PC201 on streams whose factor per block is known in closed form."""

import dataclasses
import math

import pytest
from synthetic import additive, broken_rules, factors, only_finding, run_of, site


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 12, 16, 32, 64, 200])
def test_square_root_growth_is_healthy_at_any_depth(blocks):
    assert broken_rules(run_of(additive(blocks))) == []


def test_square_root_growth_to_a_large_end_value_is_no_explosion():
    records = additive(64, embedding=20.0, updates=(30.0, 300.0))
    assert records[-1].sum_rms > 2000
    assert "PC201" not in broken_rules(run_of(records))


def test_aligned_updates_grow_linearly_and_are_no_explosion():
    records, stream = [], 1.0
    for number in range(128):
        records.append(site(number, number // 2, stream=stream, total=stream + 1))
        stream += 1
    assert "PC201" not in broken_rules(run_of(records))


def test_a_trained_gpt2_xl_is_no_explosion():
    # x1.045 a layer over 48 layers (Heimersheim and Turner 2023).
    assert broken_rules(run_of(factors(48, forward=1.045))) == []


def test_ten_percent_a_block_is_an_explosion_that_compounds_to_446():
    finding = only_finding(run_of(factors(64, forward=1.1)), "PC201")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(1.1)
    assert "x1.1 per block" in finding.message
    assert "x446 over 64 blocks" in finding.message
    assert "It grows as 1.1^block, an exponential, over blocks 16 to 63." in finding.message


def test_the_same_end_value_is_judged_by_how_it_is_reached():
    rooted = additive(64, embedding=0.1, updates=(0.0001, 5.0))
    end = rooted[-1].sum_rms / rooted[1].sum_rms
    assert "PC201" not in broken_rules(run_of(rooted))
    assert end == pytest.approx(8, rel=0.01)
    assert "PC201" in broken_rules(run_of(factors(32, forward=(5 * end) ** (1 / 32))))


def test_a_moderate_explosion_is_a_warning():
    assert only_finding(run_of(factors(12, forward=1.3)), "PC201").severity == "warning"  # 1.3^12 = 23.3


def test_a_residual_doubled_from_one_block_on_is_an_explosion():
    records, stream = [], 0.03
    for number in range(32):
        block, total = number // 2, math.hypot(stream, 0.004)
        if block >= 5 and number % 2 == 0:
            total = 2 * stream
        records.append(site(number, block, ("attention", "mlp")[number % 2], stream=stream, update=0.004, total=total))
        stream = total
    finding = only_finding(run_of(records), "PC201")
    assert finding.site.sublayer == "mlp"
    assert finding.site.block >= 5
    assert "attention additions" in finding.message


def test_one_jump_is_not_an_explosion():
    records = additive(64)
    jumped = [
        dataclasses.replace(
            r, stream_rms=r.stream_rms * (30 if r.site > 60 else 1), sum_rms=r.sum_rms * (30 if r.site >= 60 else 1)
        )
        for r in records
    ]
    found = broken_rules(run_of(jumped))
    assert "PC201" not in found
    assert "PC205" in found
